"""What can be done with checkpoints by name, for processes that do not want torch: each is done in a child.

    python -m workers.checkpoint      reads {"verb", "arguments"} from stdin, writes one JSON object per line:
                                      {"progress": [done_bytes, total_bytes]} …, at last {"result"} or {"error"}

An agent runs it in its pool's environment, the command line in its own. A reader that goes away ends it. What reads
files of strangers first sets itself limits.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import cluster.errors
import workers
import workers.errors
from cluster import sandbox
from cluster.checkpoint_location import TOOLS, is_uri
from cluster.errors import FleetError, PolyfleetError, UserError, nearest
from workers.checkpoint.format import links
from workers.checkpoint.format.manifest import LARGEST_BYTES, DamagedCheckpoint

VERBS = {
    "list": "inspect:list_checkpoints",
    "show": "inspect:describe",
    "check": "inspect:verify",
    "newest": "inspect:newest",
    "incoming": "transfer.expected:expected",
    "missing": "transfer.chunk_upload:missing",
    "arrive": "transfer.chunk_upload:arrive",
    "verify": "transfer.copier:verify_location",
    "plan": "move_plan:plan",
    "diff": "comparer:diff",
    "convert": "converter:convert",
    "prune": "pruner:prune",
    "pin": "pruner:pin_one",
    "discard": "pruner:discard",
    "copy": "transfer.copier:copy",
    "import": "exchange.importer:import_here",
    "export": "exchange.exporter:export_checkpoint",
    "look": "transfer.data_download:look",
    "fetch": "transfer.data_download:fetch",
    "keep": "scripts.script_versions:keep",
    "hand_on": "scripts.script_versions:hand_on",
}
LONG = ("verify", "check", "diff", "convert", "copy", "import", "export", "missing", "arrive", "fetch")
"""These tell their progress."""
MANIFESTS = ("list", "show", "plan", "check", "newest", "incoming")
"""These read manifests only, so memory and time have a limit that suits the largest."""
BOUNDED = ("import", "keep", "hand_on", *MANIFESTS)
"""These run with the limits of cluster/sandbox.py. The others read all bytes of checkpoints, however long it takes."""
READING = ("list", "show", "check", "newest", "plan", "diff", "convert", "export", "copy")
"""These follow links where they are called as functions; here only for the user of this machine."""
EVERY_S = 0.1
LOOK_S = 0.5
LARGEST_ANSWER_BYTES = 1 << 30
"""An incoming checkpoint's hashes are the longest."""
CODE = str(Path(workers.__file__).parents[1])
TOKENS = ("TOKEN", "SECRET", "PASSWORD")
Progress = Callable[[int, int], None]


def run(verb: str, arguments: dict[str, Any], progress: Progress | None = None) -> Any:
    """Do it in this process. Raises UserError for an unknown verb, and whatever the verb raises."""
    if verb not in VERBS:
        raise UserError(f"no tool {verb!r}", nearest(verb, tuple(VERBS)))
    for name, use in TOOLS.get(verb, {}).items():
        if is_uri(str(arguments.get(name))) and not use.stores:
            raise UserError(f"`{verb}` reads and writes folders: {arguments[name]!r} is none", "copy it here first")
    where, _, name = VERBS[verb].partition(":")
    function = getattr(import_module(f"workers.checkpoint.{where}"), name)
    options: dict[str, Any] = {"progress": progress} if verb in LONG else {}
    options |= {"follow_links": links.are_followed()} if verb in READING else {}
    return function(**arguments, **options)


def run_in_child(
    verb: str,
    arguments: dict[str, Any],
    progress: Progress | None = None,
    python: str = sys.executable,
    look: Callable[[], None] | None = None,
    follow_links: bool = False,
) -> Any:
    """The same in a process of its own. An error in `progress` ends it; so does the end of this process.

    `look` is called every LOOK_S, also while nothing is told: an error in it ends the child, too. `follow_links`: all
    paths were named by the user of this machine (format/links.py).
    """
    request = json.dumps({"verb": verb, "arguments": arguments, "follow_links": follow_links})
    child = subprocess.Popen(
        [python, "-P", "-m", "workers.checkpoint"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
    )
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    complaints: deque[bytes] = deque(maxlen=1)
    listener = threading.Thread(target=_listen, args=(child.stderr, complaints), daemon=True)
    listener.start()
    try:
        with suppress(BrokenPipeError):  # it ended at once: what it says tells why
            child.stdin.write(request.encode() + b"\n")  # and left open: its end tells the child that we are gone
            child.stdin.flush()
        return _answer(_lines(child.stdout.fileno(), look), progress)
    except _NoAnswerError:
        listener.join(1)
        raise _ended(verb, child.wait(), complaints) from None
    finally:
        child.kill()
        child.wait()
        listener.join(1)
        for stream in (child.stdin, child.stdout, child.stderr):
            with suppress(BrokenPipeError):
                stream.close()


class _NoAnswerError(Exception):
    pass


def _ended(verb: str, code: int, complaints: deque[bytes]) -> PolyfleetError:
    if verb in BOUNDED and (reached := sandbox.limit_message(code)):
        return workers.errors.CheckpointError(
            f"`{verb}` was ended: {reached}",
            "check that the file really is in its format, then try again: an undamaged one may have been busy",
        )
    last = complaints[-1].decode(errors="replace").strip() if complaints else f"exit code {code}"
    return FleetError(
        f"the process for `{verb}` exited without a result: {last:.1000}",
        "check free memory and disk space, then run it again",
    )


def _listen(stream: IO[bytes], complaints: deque[bytes]) -> None:
    with suppress(ValueError):  # closed meanwhile
        while line := stream.readline(1 << 16):
            complaints.append(line)


def _lines(descriptor: int, look: Callable[[], None] | None) -> Iterator[bytes]:
    """What a child writes, line by line."""
    held = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(descriptor, selectors.EVENT_READ)
        while True:
            if look is not None:
                look()
            if not ready.select(LOOK_S):
                continue
            data = os.read(descriptor, 1 << 16)
            held += data
            *lines, rest = held.split(b"\n") if b"\n" in data else (held,)
            yield from map(bytes, lines)
            held = rest
            if not data or len(held) > LARGEST_ANSWER_BYTES:
                return


def _answer(lines: Iterable[bytes], progress: Progress | None) -> Any:
    for line in lines:
        told = json.loads(line)
        if "result" in told:
            return told["result"]
        if "error" in told:
            raise error_from(told["error"])
        if progress is not None:
            progress(*told["progress"])
    raise _NoAnswerError


def apply_sandbox(verb: str, arguments: dict[str, Any]) -> bool:
    """Set the limits of this process before it begins with `verb`. Whether its network is cut off, or it needs one."""
    if any("://" in value for value in arguments.values() if isinstance(value, str)):
        sandbox.without_privileges()
        return True
    offline = sandbox.isolate()
    if verb in BOUNDED:
        import_module(f"workers.checkpoint.{VERBS[verb].partition(':')[0]}")
        sandbox.apply_limits()
    if verb in MANIFESTS:
        # A quarter, since text is read into less than ten times its size. One of them reads all bytes, too.
        sandbox.raise_limits(metadata_bytes=LARGEST_BYTES // 4, data_bytes=1 << 44 if verb == "check" else 0)
    return offline


def exceeds_limits(verb: str) -> dict[str, Any]:
    """The error that a process tells whose limit of memory was reached."""
    message = f"`{verb}` needs more memory than files of this size do"
    error = workers.errors.CheckpointError(message, "check that the file really is in the format you named")
    return {"kind": "CheckpointError", "arguments": list(error.args), "message": str(error)}


def error_from(told: dict[str, Any]) -> PolyfleetError:
    """The error that another process told. Its class is one of ours; any other becomes a FleetError."""
    kinds = {**vars(cluster.errors), **vars(workers.errors), "DamagedCheckpoint": DamagedCheckpoint}
    kind = kinds.get(str(told["kind"]), FleetError)
    try:
        error: PolyfleetError = kind(*told["arguments"])
    except TypeError:
        error = FleetError(told["message"])
    return error


def _environment() -> dict[str, str]:
    """Ours without tokens of the fleet: no tool needs them. Credentials of object stores stay: a copy does."""
    ours = {k: v for k, v in os.environ.items() if not (k.startswith(("POLYFLEET_", "RAY_")) and k.endswith(TOKENS))}
    path = ours.get("PYTHONPATH", "")
    return ours | {"PYTHONPATH": f"{CODE}{os.pathsep}{path}" if path else CODE}
