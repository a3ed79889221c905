"""Every reader of bytes that somebody else may have written, as `read(bytes, folder)`: an error of ours, None where it
left the input out, or what it made of it. Samples are real, valid inputs that mutations begin with.
"""

import asyncio
import hashlib
import io
import json
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cluster.environments.requirements import is_plain_requirement
from cluster.errors import PolyfleetError, UserError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_spec import parse_fleet
from cluster.input import archive_unpack, checkpoint_location, sizes, strict_yaml, untrusted_files
from orchestrator.code_archives.ignore_file import FILE, GIT_FILE, load_rules
from orchestrator.home import server_record
from orchestrator.log_lines import parse_line
from orchestrator.spec import resource_syntax
from orchestrator.spec.job_spec import parse_job
from orchestrator.submission import env_file
from workers.attempt.attempt import LocalAttempt
from workers.protocol.folders import AttemptFolder, AttemptId
from workers.protocol.messages import AttemptStatus, Outcome
from workers.storage.code_archives import NodeCodeArchives

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Target:
    """`share` is how many of a hundred inputs of a campaign it gets."""

    name: str
    share: float
    samples: Callable[[], Sequence[bytes]]
    read: Callable[[bytes, Path], object]
    close: Callable[[], None] = field(default=lambda: None)


def _text(data: bytes) -> str:
    """As surrogates where it is not UTF-8: file names and arguments reach us so."""
    return data.decode("utf-8", "surrogateescape")


# -- checkpoints


@cache
def _saved() -> Path:
    import torch

    from workers.checkpoint import save

    folder = Path(tempfile.mkdtemp(prefix="polyfleet-fuzz-"))
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "extra": {"epoch": 3, "names": ["a", {"b": 1.5}]}, "rng": True}
    saved = save(folder, 7, state).path
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, folder / "model.pt")
    return Path(saved)


def _manifests() -> list[bytes]:
    return [(_saved() / "MANIFEST.json").read_bytes()]


def _manifest(data: bytes, folder: Path) -> object:
    """With its digest put right: a stranger can do that, too."""
    from workers.checkpoint.format.manifest import manifest_digest
    from workers.checkpoint.format.manifest_checks import parse_manifest

    try:
        told = json.loads(data)
        if isinstance(told, dict):
            data = json.dumps(told | {"digest": manifest_digest(told)}).encode()
    except (ValueError, TypeError, RecursionError):
        pass
    return parse_manifest(data, "MANIFEST.json")


def _headers() -> list[bytes]:
    return [path.read_bytes()[:4096] for path in sorted(_saved().glob("*.safetensors"))]


def _header(data: bytes, folder: Path) -> object:
    from workers.checkpoint.exchange.sources.safetensors_files import read_header

    path = folder / "model.safetensors"
    path.write_bytes(data)
    return read_header(path)


def _torch_files() -> list[bytes]:
    return [(_saved().parent / "model.pt").read_bytes()]


def _torch_file(data: bytes, folder: Path) -> object:
    from workers.checkpoint.exchange.pickles.torch_archive import Archive

    path = folder / "model.pt"
    path.write_bytes(data)
    return Archive(path)


class Ran:
    """Pickled, it asks its reader for a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch fuzz-canary",)


def _pickles() -> list[bytes]:
    with zipfile.ZipFile(_saved().parent / "model.pt") as z:
        own = [z.read(name) for name in z.namelist() if name.endswith("data.pkl")]
    plain = {"a": [1, 2.5, (3, None)], "b": {"c": b"x", "d": {1, 2}}, "e": 1 << 70}
    return [*own, *(pickle.dumps(plain, protocol) for protocol in range(6)), pickle.dumps([Ran()])]


def _pickle(data: bytes, folder: Path) -> object:
    from workers.checkpoint.exchange.pickles import pickle_symbols

    return [pickle_symbols.read(data, "data.pkl", persistent=lambda pid: ("storage", repr(pid)[:100]))]


# -- submitted folders


def _zip(entries: dict[str, bytes], method: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as z:
        for name, content in entries.items():
            z.writestr(name, content)
    return made.getvalue()


def _archives() -> list[bytes]:
    files = {"train.py": b"x = 1\n" * 9, "pkg/": b"", "pkg/a/b.txt": b"caf\xc3\xa9", "run.sh": b"#!/bin/sh\n"}
    unicode = {"caf\u00e9.py": b"1", "\u65e5\u672c/a": b"2"}
    return [_zip(files, zipfile.ZIP_DEFLATED), _zip(files, zipfile.ZIP_STORED), _zip(unicode, zipfile.ZIP_DEFLATED)]


def _archive(data: bytes, folder: Path) -> object:
    """All the way: checked as at an upload, sent to a node, unpacked there."""
    path, store, target = (
        folder / "upload.zip",
        NodeCodeArchives(folder / "packages", archive_unpack.read),
        folder / "work",
    )
    sha = hashlib.sha256(data).hexdigest()
    path.write_bytes(data)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    try:
        archive_unpack.read(path)
        store.put(sha, 0, data, True)
        try:
            store.unpack(sha, target)
        except UserError as e:
            raise AssertionError(f"the server took what the node refuses: {e}") from e
        assert all(path.is_dir() or path.is_file() for path in target.rglob("*") if not path.is_symlink())
        assert not any(path.is_symlink() for path in target.rglob("*"))
        return sha
    finally:
        shutil.rmtree(folder / "packages" / sha, ignore_errors=True)


NAMES = ("a.log", "x/y/z", ".env", "a/b", "a" * 40 + "/" + "a/" * 30 + "y")


def _ignored(data: bytes, folder: Path) -> object:
    for file in (FILE, GIT_FILE):
        (folder / file).write_bytes(data)
    rules = load_rules(folder).inside(folder, "")
    return [rules.exclusion_reason(name, is_folder) for name in NAMES for is_folder in (True, False)]


def _variables(data: bytes, folder: Path) -> object:
    (folder / "variables.env").write_bytes(data)
    return env_file.read(folder / "variables.env")


# -- what users write


def _job_files() -> list[bytes]:
    written = [path.read_bytes() for path in sorted((ROOT / "examples").glob("*.yaml"))]
    return [*written, b"task: run\ncommand: [echo, hi]\nresources: {any_of: [{accelerators: 'cpu:1'}, {pool: x}]}\n"]


def _job_file(data: bytes, folder: Path) -> object:
    return parse_job(strict_yaml.load(_text(data), "job.yaml")).to_job("j-1", 0.0)


def _fleet_files() -> list[bytes]:
    written = [path.read_bytes() for path in sorted((ROOT / "cluster" / "fleet" / "fleets").glob("*.yaml"))]
    lines = (
        b"pools: {a: {backend: cpu, environment: {requirements: ['torch==2.9.0; python_version > \"3\"']}, nodes: 2}}"
    )
    return [*written, lines]


def _fleet_file(data: bytes, folder: Path) -> object:
    return parse_fleet(strict_yaml.load(_text(data), "fleet.yaml"))


def _place(data: bytes, folder: Path) -> object:
    place = checkpoint_location.parse_location(_text(data), "source")
    assert checkpoint_location.parse_location(str(place), "source") == place
    assert ".." not in place.path.split("/") and not place.path.startswith("/")
    assert not place.scheme or place.scheme in checkpoint_location.SCHEMES
    return place


def _requirement(data: bytes, folder: Path) -> object:
    from packaging.requirements import Requirement

    text = _text(data)
    if not is_plain_requirement(text):
        return None
    assert Requirement(text.strip(" ")).url is None and "\n" not in text
    return text


def _resource(data: bytes, folder: Path) -> object:
    text, read = _text(data), []
    for parse in (resource_syntax.accelerators, sizes.size_bytes, resource_syntax.duration_s):
        try:
            read.append(parse(text))
        except UserError:
            continue
    return read or None


# -- what jobs and other processes write


def _json(data: bytes, folder: Path) -> object:
    return [untrusted_files.parse_json(data, "a file")]


def _attempt(folder: Path) -> LocalAttempt:
    attempt = AttemptFolder(folder / "attempts" / "j-1.1.0")
    for path in (attempt.path, attempt.events.parent):
        path.mkdir(parents=True, exist_ok=True)
    return LocalAttempt(AttemptId("j-1", 1, 0), attempt, 20.0)


def _event_lines() -> list[bytes]:
    told = (
        {"type": "report", "step": 3, "loss": 0.5},
        {"type": "checkpoint", "path": "/s/j-1/step-00000001-0a1b2c3d", "step": 1, "bytes": 10, "seconds": 0.1},
        {"type": "note", "preempted": True},
        {"type": "phase", "name": "compile"},
    )
    return [b"".join(json.dumps({"t": 1.7e9 + n, "rank": 0, **e}).encode() + b"\n" for n, e in enumerate(told))]


def _events(data: bytes, folder: Path) -> object:
    attempt = _attempt(folder)
    attempt.folder.outcome.unlink(missing_ok=True)
    attempt.folder.events.write_bytes(data)
    told = attempt.status_if_changed(0, "starting", 1000, 1 << 20)
    if told is not None:
        assert all(isinstance(event.t, int | float) and abs(event.t) < 1e300 for event in told.events)
        assert AttemptStatus.parse(json.loads(json.dumps(told.to_plain(), allow_nan=False))) == told
    return told


def _outcomes() -> list[bytes]:
    named = {
        "job": "j-1",
        "epoch": 1,
        "node_rank": 0,
        "exit_codes": {"0": 1},
        "result": {"loss": 0.5},
        "ended_s": 1.7e9,
    }
    failure = {"rank": 0, "node": "cpu-0", "kind": "user", "message": "m", "traceback": "t", "exit_code": 1}
    ended = ("failed", "succeeded", "lost", "preempted", "cancelled")
    return [
        json.dumps({**named, "state": state, "failure": failure if state == "failed" else None}).encode()
        for state in ended
    ]


def _outcome(data: bytes, folder: Path) -> object:
    attempt = _attempt(folder)
    attempt.folder.outcome.write_bytes(data)
    found = attempt.outcome
    if found is not None:
        assert found.state in ("failed", "succeeded", "lost", "preempted", "cancelled"), found.state
        assert Outcome.parse(json.loads(json.dumps(found.to_plain(), allow_nan=False))) == found
    return found


def _log_line(data: bytes, folder: Path) -> object:
    return [parse_line(text, 1, 0) for text in data.decode("utf-8", "replace").split("\n")]


def _fleet_records() -> list[bytes]:
    node = {"role": "head", "node": "head", "pool": "", "pid": 1, "created": 1.0}
    told = {
        "name": "local", "state": "up", "address": "127.0.0.1:6379", "version": "0.1.0", "started_s": 1.0,
        "token_path": "/t", "temp_dir": "/tmp/x", "loopback": True, "processes": [node], "pools": {"cpu": {}},
        "skipped_pools": [["x", "y"]],
    }  # fmt: skip
    return [json.dumps(told).encode()]


def _fleet_record(data: bytes, folder: Path) -> object:
    os.environ["POLYFLEET_HOME"] = str(folder)
    (folder / "fleet.json").write_bytes(data)
    return fleet_record.read()


def _server_records() -> list[bytes]:
    told = {"pid": 12, "created": 1.5, "port": 8000, "version": "0.1.0", "started_at": "2026-11-20", "socket": "/s"}
    return [json.dumps(told).encode()]


def _server_record(data: bytes, folder: Path) -> object:
    (folder / "server.json").write_bytes(data)
    return server_record.read(folder)


# -- HTTP


_opened: list[Path] = []
POLLS = (b"stream", b"follow", b"changes", b"shutdown")
"""Answers that take their time by design."""


@cache
def _server(folder: Path) -> tuple[Any, Any, Path, asyncio.AbstractEventLoop]:
    """A real service without a fleet behind the real application; requests are given to it directly."""
    from orchestrator.server.app import make_app
    from orchestrator.services.service import Service

    home = folder / "home"
    home.mkdir()
    os.environ["POLYFLEET_HOME"] = str(home)
    _opened.append(folder)
    service = Service(home)
    app = make_app(service, "token", home=home, stop=lambda: None)
    return app, service, home, asyncio.new_event_loop()


def _close_server() -> None:
    while _opened:
        _, service, _, loop = _server(_opened.pop())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        service.close()
    _server.cache_clear()


def _requests() -> list[bytes]:
    spec = {"task": "run", "command": "true", "resources": {"accelerators": "cpu:1"}}
    return [
        b"GET /v1/jobs?state=RUNNING&limit=10\n",
        b"GET /v1/jobs/j-1\n",
        b"GET /v1/jobs/j-1/logs?rank=0&attempt=1&tail=5&cursor=%7B%221.0%22%3A%203%7D\n",
        b"GET /v1/jobs/j-1/reports?after=0\n",
        b"GET /v1/jobs/j-1/history\n",
        b"GET /v1/checkpoints?pool=cpu&prefix=a\n",
        b"GET /v1/checkpoints/show?ref=cpu:a/b\n",
        b"GET /v1/checkpoints/plan?ref=cpu:a&to_kind=tpu:v5e&count=1\n",
        b"GET /v1/benchmarks/b-1/lines?after=0\n",
        b"GET /v1/schema/job\n",
        b"HEAD /v1/code-archives/" + b"0" * 64 + b"\n",
        b"POST /v1/jobs\n" + json.dumps({"spec": spec, "content_sha": ""}).encode(),
        b"POST /v1/plan\n" + json.dumps({"spec": spec}).encode(),
        b"POST /v1/offers\n" + json.dumps({"spec": spec, "content_sha": ""}).encode(),
        b"POST /v1/checkpoints/verify\n" + json.dumps({"place": "cpu:a"}).encode(),
        b"POST /v1/benchmarks\n" + json.dumps({"request": {"suite": "quick"}, "code_archive": ""}).encode(),
        b"PUT /v1/code-archives/" + b"0" * 64 + b"\nPK",
    ]


def _request(data: bytes, folder: Path) -> object:
    """The status: never one of 500."""
    app, _, _, loop = _server(folder)
    head, _, body = data.partition(b"\n")
    method, _, target = head.partition(b" ")
    raw, _, query = target.partition(b"?")
    status = loop.run_until_complete(_answered(app, method, raw, query, body))
    assert status < 500 or status == 503, f"status {status}"
    return status if status < 400 else None


async def _answered(app: Any, method: bytes, raw: bytes, query: bytes, body: bytes) -> int:
    if any(word in raw or word in query for word in POLLS):
        return 400
    kind = b"application/zip" if method == b"PUT" else b"application/json"
    headers = [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer token"), (b"content-type", kind)]
    path = raw.decode("latin-1")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": method.decode("latin-1")[:20].upper() or "GET", "path": path, "raw_path": quote(path).encode(),
        "root_path": "", "query_string": query, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        "headers": [*headers, (b"content-length", str(len(body)).encode()), (b"idempotency-key", b"k")],
    }  # fmt: skip
    statuses, gone = [], asyncio.Event()

    async def receive() -> dict[str, Any]:
        if gone.is_set():
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}
        gone.set()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    try:
        await app(scope, receive, send)
    except PolyfleetError:
        return 422
    return statuses[0]


def _strings(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


TARGETS = (
    Target("manifest", 6, _manifests, _manifest),
    Target("safetensors header", 7, _headers, _header),
    Target("pickle", 10, _pickles, _pickle),
    Target("torch file", 4, _torch_files, _torch_file),
    Target("archive", 5, _archives, _archive),
    Target("ignore file", 2, _strings("*.log\n!keep\n/a/**/b\n[a-z]?\n", "[[:digit:]_-]*\\ \n/**/x/\n"), _ignored),
    Target("env file", 1, _strings("A=1 # b\nexport B='x'\nC=\"a\\n$\nb\"\n"), _variables),
    Target("job file", 5, _job_files, _job_file),
    Target("fleet file", 4, _fleet_files, _fleet_file),
    Target("json", 12, lambda: [*_manifests(), *_outcomes()], _json),
    Target("events", 8, _event_lines, _events),
    Target("outcome", 6, _outcomes, _outcome),
    Target(
        "log line",
        8,
        _strings("2026-11-20T23:14:53.123456Z out hello\n2026-11-20T23:14:54.1Z err w\u00f6rld"),
        _log_line,
    ),
    Target("HTTP request", 2, _requests, _request, _close_server),
    Target("fleet record", 4, _fleet_records, _fleet_record),
    Target("server record", 4, _server_records, _server_record),
    Target(
        "place", 5, _strings("cpu:digits-3f9a2c/step-00000200-0a1b2c3d", "s3://bucket/runs/a", "gs://b.c/x"), _place
    ),
    Target(
        "requirement",
        4,
        _strings("torch==2.9.0", "a[b,c]>=1,<2; python_version < '3.13'", "x~=1.0.post1"),
        _requirement,
    ),
    Target("resource", 3, _strings("nvidia:A100-80GB,H100:2..8", "16GiB", "1h30m", "cpu:1", "any"), _resource),
)
