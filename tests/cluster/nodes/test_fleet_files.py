"""What is kept on disk about a fleet, and how its nodes are started."""

import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord, NodeProcess
from cluster.fleet.fleet_spec import parse_fleet
from cluster.host import tokens
from cluster.nodes import embedded
from cluster.nodes.connect import prepare
from cluster.nodes.ray_node import (
    head_command,
    inherited_environment,
    node_environment,
    resource_counts,
    worker_command,
)
from cluster.nodes.raylets import stop_all
from cluster.paths import private_dir


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def record(**more: object) -> FleetRecord:
    return FleetRecord("f", "up", "127.0.0.1:1", "0.1.0", 1.0, "/token", **more)


def test_a_record_comes_back_as_it_was_written_and_only_its_owner_reads_it(home: Path):
    written = record(
        temp_dir="/tmp/x", processes=(NodeProcess("head", "head", "", 1, 2.0),), skipped_pools=(("xla", "no"),)
    )
    fleet_record.write(written)
    assert fleet_record.read() == written
    assert stat.S_IMODE(fleet_record.path().stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_without_a_fleet_there_is_no_record():
    assert fleet_record.read() is None


def test_a_fleet_whose_head_is_gone_is_headless_an_attached_one_never():
    assert record(temp_dir="/tmp/x", processes=(NodeProcess("head", "head", "", 1, 2.0),)).is_headless
    assert not record().is_headless


def test_many_makers_at_once_agree_on_one_token_of_mode_0600(tmp_path: Path):
    path = tmp_path / "t" / "token"
    with ThreadPoolExecutor(8) as threads:
        seen = list(threads.map(lambda _: tokens.read(tokens.create_token(path)), range(32)))
    assert len(set(seen)) == 1 and len(seen[0]) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["token"]


def test_each_fleet_has_a_token_of_its_own_which_goes_with_it(home: Path):
    spec = parse_fleet({"name": "f", "pools": {"p": {"backend": "cpu"}}})
    private_dir(home)
    (home / "ray-token").write_text("of an earlier fleet")
    first = embedded._new_record(spec, (), {})
    second = embedded._new_record(spec, (), {})
    assert [p.name for p in home.glob("ray-token*")] == [Path(second.token_path).name]
    assert first.token_path != second.token_path and stat.S_IMODE(Path(second.token_path).stat().st_mode) == 0o600
    for made in (first, second):
        stop_all(made)
    assert list(home.glob("ray-token*")) == []


def test_a_token_of_ours_is_made_anew_and_that_of_the_user_is_kept(tmp_path: Path):
    path = tokens.rotate(tmp_path / "token")
    first = tokens.read(path)
    assert tokens.read(tokens.rotate(path)) != first and len(first) == 64
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}
    path.write_text("w" * 40 + "\n")
    assert tokens.read(tokens.rotate(path)) == "w" * 40
    path.unlink()
    assert tokens.read(tokens.rotate(path)) not in (first, "w" * 40)


def test_a_token_stays_ours_when_making_the_next_one_broke_off(tmp_path: Path):
    path = tokens.rotate(tmp_path / "token")
    first = path.read_text()
    tokens.rotate(path)
    path.write_text(first)  # as a crash leaves it: the record of the new token is written, the token itself is not
    assert tokens.read(tokens.rotate(path)) != first


def test_a_token_file_that_others_can_read_is_closed(tmp_path: Path):
    path = tokens.create_token(tmp_path / "token")
    path.chmod(0o644)
    assert stat.S_IMODE(tokens.create_token(path).stat().st_mode) == 0o600


def test_another_clusters_ray_variables_do_not_reach_ours():
    base = {
        "PATH": "/bin",
        "RAY_ADDRESS": "x",
        "PYTHONPATH": "y",
        "POLYFLEET_HOME": "z",
        "VIRTUAL_ENV": "v",
        "HTTP_PROXY": "p",
        "POLYFLEET_COPY_RATE": "50MB",
    }
    assert inherited_environment(base) == {"PATH": "/bin", "HTTP_PROXY": "p", "POLYFLEET_COPY_RATE": "50MB"}


def test_every_node_authenticates_stays_on_loopback_and_counts_only_what_we_say():
    env = node_environment(Path("/token"), Path("/code"), {"autoscaler": 1, "dashboard": 2}, {"PJRT_DEVICE": "CPU"})
    assert (env["RAY_AUTH_MODE"], env["RAY_AUTH_TOKEN_PATH"]) == ("token", "/token")
    assert env["RAY_START_HOOK"] == "cluster.nodes.ray_start_hook.prepare_node" and env["PYTHONPATH"] == "/code"
    assert "--num-cpus=0" in head_command(Path("/py"), 6379, Path("/tmp/x"))
    command = worker_command(Path("/py"), "127.0.0.1:1", {"a": "b"}, {"CPU": 2, "TPU": 4})
    assert {"--num-cpus=2", "--num-gpus=0", '--resources={"TPU": 4}', "--labels=a=b"} <= set(command)


def test_an_emulated_device_is_counted_as_the_cpu_it_is():
    assert resource_counts("tpu", 1, 8, emulated=True) == {"CPU": 8}
    assert resource_counts("nvidia", 4, 8, emulated=False) == {"CPU": 8, "GPU": 4}


def test_a_foreign_cluster_without_a_token_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(FleetError, match="RAY_AUTH_MODE=token"):
        tokens.external_token()


def test_connecting_drops_variables_of_other_clusters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.environ", {"RAY_ADDRESS": "elsewhere", "HOME": "/h"})
    prepare(record())
    import os

    assert "RAY_ADDRESS" not in os.environ and os.environ["RAY_AUTH_TOKEN_PATH"] == "/token"


def test_ray_forgets_the_token_of_the_fleet_before(tmp_path: Path):
    script = """
import sys
from cluster.nodes.connect import prepare
from cluster.fleet.fleet_record import FleetRecord
for path in sys.argv[1:]:
    prepare(FleetRecord("f", "up", "127.0.0.1:1", "0", 1.0, path))
    from ray._raylet import AuthenticationTokenLoader
    print(AuthenticationTokenLoader.instance().get_token_for_http_header()["authorization"])
"""
    paths = [tokens.create_token(tmp_path / name) for name in ("first", "second")]
    told = subprocess.run([sys.executable, "-c", script, *map(str, paths)], capture_output=True, text=True)
    assert told.stdout.split()[1::2] == [tokens.read(path) for path in paths]


def test_a_place_that_takes_no_folders_is_an_error_of_the_system():
    """/proc says of a folder above, which is there, that it is missing."""
    with pytest.raises(OSError, match="none"):
        private_dir(Path("/proc/none/ours"))
