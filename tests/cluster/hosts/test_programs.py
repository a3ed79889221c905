"""The two programs that run on a host before anything of ours is there, as ssh would run them; and the certificates."""

import base64
import io
import json
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cluster.fleet import tls
from cluster.hosts import host_python, host_steps, plan
from cluster.hosts.ssh import Remote

OURS = Path(host_steps.__file__).parent


def look(**asked):
    asked = {"interpreters": [], "port": 0} | asked
    code = f"REQUEST = {asked!r}\n" + (OURS / "host_facts.py").read_text()
    done = subprocess.run(["sh", "-c", host_python.FIND], input=code, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_look_at_this_machine_tells_all_that_a_plan_needs():
    told = look(identity="x", code="y", address="127.0.0.1")
    found = plan.parse_facts(told, told["time_s"], told["time_s"])
    assert (found.has_address, found.has_code, found.skew_s) == (True, False, 0.0)
    assert found.python_version.startswith(host_python.VERSION)
    assert Path(found.home).parent == Path.home() / ".polyfleet/hosts/x"


def test_an_address_of_another_machine_is_seen():
    assert look(identity="x", code="y", address="192.0.2.1")["has_address"] is False


def test_a_port_that_another_program_listens_on_is_seen():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = look(identity="x", code="y", address="127.0.0.1", port=other.getsockname()[1])
    assert (taken["has_address"], taken["has_port"]) == (True, False)


@pytest.mark.parametrize(
    ("line", "uv", "said"),
    [
        ("no-python\t/home/a/.local/bin/uv\tPython 3.6.8", "/home/a/.local/bin/uv", "(it has Python 3.6.8)"),
        ("no-python\tuv\tsh: 1: python3: not found", "uv", "has no Python"),
        ("no-python", "", "has no Python"),
    ],
)
def test_a_host_without_our_python_is_told_with_what_could_install_one(line, uv, said):
    with pytest.raises(host_python.PythonMissing) as refused:
        host_python.check_present(Remote("a"), line)
    assert refused.value.uv == uv and said in refused.value.message
    host_python.check_present(Remote("a"), '{"system": "Linux"}')


def receive(target, *members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    script = base64.b64encode((OURS / "code_receiver.py").read_bytes()).decode()
    words = [sys.executable, "-I", "-c", f"import base64; exec(base64.b64decode('{script}'))", str(target)]
    return subprocess.run(words, input=packed.getvalue(), capture_output=True, check=False)


def test_code_appears_whole_and_replaces_what_was_there(tmp_path):
    target = tmp_path / "code" / "abc"
    assert receive(target, ("cluster/a.py", b"1")).returncode == 0
    assert receive(target, ("cluster/b.py", b"2")).returncode == 0
    assert [str(p.relative_to(target)) for p in target.rglob("*.py")] == ["cluster/b.py"]
    assert [p.name for p in target.parent.iterdir()] == ["abc"]


@pytest.mark.parametrize("member", [("../x", b"1"), ("/tmp/x", b"1"), ("a", None)])
def test_what_is_no_file_of_the_folder_is_refused_and_nothing_stays(tmp_path, member):
    target = tmp_path / "code" / "abc"
    done = receive(target, ("ok.py", b"1"), member)
    assert done.returncode == 1
    assert b"is not a file of our code" in done.stderr
    assert list(target.parent.iterdir()) == []


def test_each_machine_has_a_certificate_for_its_address_and_loopback_from_one_authority(tmp_path):
    from cryptography import x509

    tls.make_authority(tmp_path / "authority")
    tls.make_certificate(tmp_path / "authority", tmp_path / "node", ("10.0.0.8",))
    authority = x509.load_pem_x509_certificate((tmp_path / "authority/ca.crt").read_bytes())
    node = x509.load_pem_x509_certificate((tmp_path / "node/node.crt").read_bytes())
    node.verify_directly_issued_by(authority)
    named = node.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(one) for one in named.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "10.0.0.8"]
    assert (tmp_path / "node/ca.crt").read_bytes() == (tmp_path / "authority/ca.crt").read_bytes()
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "node").iterdir()} == {0o600}
    assert not (tmp_path / "node/ca.key").exists()
