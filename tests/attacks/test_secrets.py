"""A secret that code prints, reports, returns or raises is in no file of the node and in nothing its agent says."""

import base64
import hashlib
import html
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from log_readers import Node

from cluster.errors import SpecError
from cluster.host import log_files
from cluster.serialization import to_plain
from orchestrator.runtime.controller.secrets import resolve_secrets
from orchestrator.spec.job_spec import parse_job
from workers.attempt.supervision.rank_log import MAX_LINE_BYTES, RankLog
from workers.protocol.redaction import Redactor
from workers.storage.code_archives import NodeCodeArchives

CANARY = "c4n4ry/\"é'+ &<7f3a91\\x>9=d"


@pytest.fixture
def node(tmp_path):
    it = Node(tmp_path)
    yield it
    it.close()


def printed(secret):
    """What programs make of a secret before it reaches a log, each by the library that does it, as bytes."""
    data = secret.encode()
    go, net = json.dumps(secret, ensure_ascii=False), json.dumps(secret)[1:-1].replace('\\"', '"')
    for character in "<>&":
        go = go.replace(character, f"\\u{ord(character):04x}")
    for character in "<>&'+\"":
        net = net.replace(character, f"\\u{ord(character):04x}")
    texts = {
        "plain": secret,
        "repr": repr(secret),
        "repr of a list": repr([secret, 1]),
        "repr beside a double quote": repr(secret + '"'),
        "ascii": ascii(secret),
        "repr of bytes": repr(data),
        "json": json.dumps({"token": secret}),
        "json as UTF-8": json.dumps([secret], ensure_ascii=False),
        "json of PHP": json.dumps(secret).replace("/", "\\/"),
        "json of Go": go,
        "json of .NET": re.sub(r"(?<=\\u)....", lambda match: match[0].upper(), net),
        "json, all escaped": "".join(f"\\u{ord(c):04X}" for c in secret),
        "json in json": json.dumps({"body": json.dumps({"token": secret})}),
        "quote": quote(secret, safe=""),
        "quote of a path": quote(secret),
        "quote_plus": quote_plus(secret),
        "quote in lower case": re.sub("%..", lambda match: match[0].lower(), quote(secret, safe="")),
        "HTML": html.escape(secret),
        "shell": shlex.quote(secret),
        "hex": data.hex(),
        "HEX": data.hex().upper(),
        "basic auth": base64.b64encode(b"user:" + data).decode(),
        "base64": base64.b64encode(data).decode(),
        "base64 behind one byte": base64.b64encode(b"x" + data + b"y").decode(),
        "base64 behind two": base64.b64encode(b"xx" + data + b"y").decode(),
        "base64 for URLs": base64.urlsafe_b64encode(b"id:" + data).decode(),
    }
    return {name: text.encode() for name, text in texts.items()} | {"UTF-16": secret.encode("utf-16-le")}


def core(form, secret):
    """Of a printed form the part that nothing but the secret decides."""
    return form[6:-8] if len(form) > len(secret.encode()) + 4 else form


@pytest.mark.parametrize("name", printed(CANARY))
def test_a_secret_is_masked_in_every_form_it_is_usually_printed_in(name):
    form = printed(CANARY)[name]
    clean = Redactor([CANARY]).clean(b"before " + form + b" after")
    assert b"***" in clean and clean.startswith(b"before ") and clean.endswith(b" after")
    assert core(form, CANARY) not in clean
    assert len(clean) < len(form)


def packed(root, text):
    with zipfile.ZipFile(root / "sent.zip", "w") as z:
        z.writestr("train.py", text)
    data = (root / "sent.zip").read_bytes()
    sha = hashlib.sha256(data).hexdigest()
    NodeCodeArchives(root / "packages").put(sha, 0, data, True)
    return sha


def holding(root, secret):
    """Names of files below `root` in which the secret stands in some form."""
    forms = {core(form, secret) for form in printed(secret).values()}
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if any(form in path.read_bytes() for form in forms)]


TRAIN = """
import base64, json, os, sys
def train(ctx):
    secret = os.environ["KEY"]
    for form in json.loads(base64.b64decode(ctx.arguments["recipe"])):
        data = base64.b64decode(form).replace(b"@SECRET@", secret.encode())
        sys.stdout.buffer.write(data + b"\\n")
    print(repr(secret), json.dumps(secret), base64.b64encode(b"user:" + secret.encode()), file=sys.stderr)
    ctx.report(1, token=secret, **{"of " + secret: 0.5})
    ctx.events.write("note", said=repr([secret]), all={secret: [secret]})
    if "fail" in ctx.arguments:
        raise ValueError("refused: " + repr(secret)) from KeyError(secret)
    return {"token": secret, secret: [json.dumps(secret)]}
"""


@pytest.mark.parametrize("fail", [False, True])
def test_nothing_a_training_job_says_of_its_secret_is_kept_or_told(node, fail):
    recipe = base64.b64encode(json.dumps([base64.b64encode(b"token=@SECRET@").decode()]).encode()).decode()
    arguments = {"recipe": recipe} | ({"fail": True} if fail else {})
    sha = packed(node.root, TRAIN)
    order = {"task": "train", "command": (), "entry": "train.py:train", "code_archive": sha, "arguments": arguments}
    node.start(secrets={"KEY": CANARY}, **order)
    ended = node.outcome()
    assert ended["state"] == ("failed" if fail else "succeeded"), node.text()
    news = [report.to_plain() for report in node.attempts.wait_for_changes({}, {}, 0.0)]
    told = json.dumps([ended, news, node.text()], ensure_ascii=False).encode()
    assert told.count(b"***") >= 5
    assert not [name for name, form in printed(CANARY).items() if core(form, CANARY) in told]
    assert holding(node.root, CANARY) == []


def test_the_failure_of_any_rank_is_masked_before_it_is_written(node):
    """The supervisor reads that of the rank that failed first; those of the others lay open beside it."""
    shared = node.root / "shared"
    (shared / "work" / "1").mkdir(parents=True)
    (shared / "work" / "1" / "train.py").write_text("import os\ndef train(ctx): raise ValueError(os.environ['KEY'])\n")
    (shared / "order.json").write_text(json.dumps(to_plain(node.order(task="train", entry="train.py:train"))))
    secret = {"POLYFLEET_SECRETS": "KEY", "KEY": CANARY}
    environ = {**os.environ, **secret, "POLYFLEET_ATTEMPT_DIR": str(shared), "RANK": "1"}
    command = [sys.executable, "-P", "-m", "workers.tasks.rank_main"]
    subprocess.run(command, env=environ, cwd=shared / "work" / "1", capture_output=True)
    assert json.loads((shared / "failure-1.json").read_text())["message"] == "ValueError: ***"
    assert holding(shared, CANARY) == []


KEY_FILE = "-----BEGIN KEY-----\nab\nMIIEvQIBADANBgkq\n\ncd\n-----END KEY-----"


@given(st.lists(st.integers(0, 200), max_size=6), st.sampled_from([KEY_FILE, CANARY, "ab\ncd", "x\r\ny1"]), st.data())
def test_a_secret_is_masked_however_the_stream_that_has_it_arrives(tmp_path_factory, cuts, secret, data):
    text = data.draw(st.sampled_from([b"", b"before\n", b"no end "])) + secret.encode() + b" after\nlast\n"
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    path = tmp_path_factory.mktemp("log") / "rank-0.log"
    log = RankLog(path, Redactor([secret]))
    for start, end in pairwise(ends):
        log.feed("out", text[start:end])
    log.close()
    said = [line.split(b" ", 2)[2] for line in log_files.read(path, 0, 1 << 20).data.split(b"\n")[:-1]]
    assert said[-2:] == [said[-2], b"last"] and said[-2].endswith(b"*** after")
    assert b"\n".join(said[:-2]) in (b"", b"before")


@pytest.mark.parametrize("at", [-40, -10, -1, 0, 3])
def test_a_secret_where_a_line_without_end_is_cut_is_masked(tmp_path, at):
    log = RankLog(tmp_path / "log", Redactor([CANARY]))
    line = b"." * (MAX_LINE_BYTES + at) + CANARY.encode() + b"." * MAX_LINE_BYTES
    for start in range(0, len(line), 1000):
        log.feed("out", line[start : start + 1000])
    log.close()
    said = b"".join(text[32:] for text in (tmp_path / "log").read_bytes().split(b"\n"))
    assert said == line.replace(CANARY.encode(), b"***")


@given(st.lists(st.text(min_size=4, max_size=12).filter(lambda s: "*" not in s), min_size=1, max_size=4), st.text())
def test_no_text_keeps_any_of_several_secrets(secrets, between):
    clean = Redactor(secrets)(between.join(["", *secrets, ""]))
    assert not [secret for secret in secrets if secret in clean.replace("***", "\0")]


def test_a_secret_too_short_to_be_masked_is_told_in_the_log(node):
    node.python("j", "import os; print('a', os.environ['PIN'])", secrets={"PIN": "a"})
    assert node.outcome()["state"] == "succeeded"
    assert node.text() == ["err [polyfleet: a secret is shorter than 4 characters and not masked]", "out a a"]


def made(path, how):
    if how == "a pipe":
        os.mkfifo(path)
    elif how == "a folder":
        path.mkdir()
    elif how == "a sparse file of a terabyte":
        path.touch()
        os.truncate(path, 1 << 40)
    elif how == "a link to a device":
        path.symlink_to("/dev/zero")
    elif how == "a link to itself":
        path.symlink_to(path)
    else:
        path.write_bytes(how)
    return path


@pytest.mark.parametrize(
    "how",
    (
        *("a pipe", "a folder", "a sparse file of a terabyte", "a link to a device", "a link to itself"),
        *(b"\xff", b"a\0b", b" \n", b"x" * 70_000),
    ),
)
def test_a_file_that_is_no_secret_is_refused_at_once_by_the_name_of_its_field(tmp_path, how):
    path = made(tmp_path / "key", how)
    with pytest.raises(SpecError) as raised:
        resolve_secrets({"KEY": f"file:{path}"})
    assert raised.value.field == "secrets.KEY" and str(path) in raised.value.message


def test_many_pipes_do_not_hold_the_server(tmp_path):
    for number in range(45):
        os.mkfifo(tmp_path / str(number))
    with pytest.raises(SpecError, match="not a regular file"):
        resolve_secrets({f"K{n}": f"file:{tmp_path / str(n)}" for n in range(45)})


def test_a_secret_behind_a_link_is_read(tmp_path):
    """As Kubernetes mounts them."""
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "key").write_text("s3cr3t\n")
    (tmp_path / "key").symlink_to("..data/key")
    assert resolve_secrets({"KEY": f"file:{tmp_path / 'key'}"}) == {"KEY": "s3cr3t"}


@pytest.mark.parametrize(("value", "why"), [("", "is empty"), ("x" * 70_000, "longer than 65536"), ("\udcff", "UTF-8")])
def test_a_variable_that_is_no_secret_is_refused(monkeypatch, value, why):
    monkeypatch.setenv("OF_SERVER", value)
    with pytest.raises(SpecError, match=why) as raised:
        resolve_secrets({"KEY": "env:OF_SERVER"})
    assert raised.value.field == "secrets.KEY"


def test_secrets_are_limited_in_number_and_together(tmp_path):
    (tmp_path / "key").write_text("x" * 60_000)
    with pytest.raises(SpecError, match="1048576 bytes together"):
        resolve_secrets({f"K{n}": f"file:{tmp_path / 'key'}" for n in range(18)})
    with pytest.raises(SpecError, match="has 101 secrets") as raised:
        parse_job({"command": "x", "secrets": {f"K{n}": "env:HOME" for n in range(101)}})
    assert raised.value.field == "secrets"


def test_a_variable_longer_than_the_system_takes_is_refused_before_it_runs():
    with pytest.raises(SpecError, match="A is longer than 65536 bytes"):
        parse_job({"command": "x", "env": {"A": "x" * 70_000}})


def test_a_command_longer_than_the_system_takes_says_so(node):
    node.start(command=("echo", "x" * 200_000))
    failure = node.outcome()["failure"]
    assert failure["kind"] == "start" and "longer than the system allows" in failure["message"]
