"""Run checkpoint tools by name (tool_table.py), each in a child process, so that the caller needs no torch.

    python -m workers.checkpoint      reads {"verb", "arguments"} from stdin, writes one JSON object per line:
                                      {"progress": [done_bytes, total_bytes]} …, at last {"result"} or {"error"}

An agent runs it in its pool's environment, the command line in its own. The child exits when its caller does. Tools
that read untrusted files limit their own resources first.
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
from cluster.errors import FleetError, PolyfleetError, UserError, nearest
from cluster.input import sandbox
from cluster.input.checkpoint_location import is_uri
from workers.checkpoint.format import links
from workers.checkpoint.format.manifest import MAX_MANIFEST_BYTES, DamagedCheckpoint
from workers.checkpoint.tool_table import TOOLS, Limits

PROGRESS_INTERVAL_S = 0.1
CHECK_INTERVAL_S = 0.5
MAX_REPLY_BYTES = 1 << 30
"""Maximum length of a reply line. The longest has the hashes of an incoming checkpoint."""
CODE = str(Path(workers.__file__).parents[1])
TOKENS = ("TOKEN", "SECRET", "PASSWORD")
Progress = Callable[[int, int], None]


def run(verb: str, arguments: dict[str, Any], progress: Progress | None = None) -> Any:
    """Run a tool in this process. Raises UserError for an unknown verb, and whatever the tool raises."""
    if verb not in TOOLS:
        raise UserError(f"no tool {verb!r}", nearest(verb, tuple(TOOLS)))
    tool = TOOLS[verb]
    for name, use in tool.locations.items():
        if is_uri(str(arguments.get(name))) and not use.allows_stores:
            raise UserError(f"`{verb}` works on folders: {arguments[name]!r} is a URI", "copy it to this machine first")
    function = getattr(import_module(tool.module), tool.function.partition(":")[2])
    options: dict[str, Any] = {"progress": progress} if tool.has_progress else {}
    options |= {"follow_links": links.are_followed()} if tool.follows_links else {}
    return function(**arguments, **options)


def run_in_child(
    verb: str,
    arguments: dict[str, Any],
    progress: Progress | None = None,
    python: str = sys.executable,
    check: Callable[[], None] | None = None,
    follow_links: bool = False,
) -> Any:
    """Run a tool in a child process. The child is killed when `progress` raises, and exits when this process does.

    `check` is called every CHECK_INTERVAL_S, also while there is no output: an error in it ends the child, too.
    `follow_links`: all paths were named by the user of this machine (format/links.py).
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
    last_stderr: deque[bytes] = deque(maxlen=1)
    stderr_reader = threading.Thread(target=_read_stderr, args=(child.stderr, last_stderr), daemon=True)
    stderr_reader.start()
    try:
        with suppress(BrokenPipeError):  # it exited at once: its stderr has the reason
            child.stdin.write(request.encode() + b"\n")  # stays open: the child exits when it closes
            child.stdin.flush()
        return _read_reply(_lines(child.stdout.fileno(), check), progress)
    except _NoReplyError:
        stderr_reader.join(1)
        raise _exit_error(verb, child.wait(), last_stderr) from None
    finally:
        child.kill()
        child.wait()
        stderr_reader.join(1)
        for stream in (child.stdin, child.stdout, child.stderr):
            with suppress(BrokenPipeError):
                stream.close()


class _NoReplyError(Exception):
    pass


def _exit_error(verb: str, code: int, last_stderr: deque[bytes]) -> PolyfleetError:
    is_limited = verb in TOOLS and TOOLS[verb].limits is not Limits.NONE
    if is_limited and (limit := sandbox.limit_message(code)):
        return workers.errors.CheckpointError(
            f"`{verb}` was stopped: {limit}",
            "check that the file is in the format you named, then run it again: this machine may have been busy",
        )
    last = last_stderr[-1].decode(errors="replace").strip() if last_stderr else f"exit code {code}"
    return FleetError(
        f"the process for `{verb}` exited without a result: {last:.1000}",
        "check free memory and disk space, then run it again",
    )


def _read_stderr(stream: IO[bytes], last_lines: deque[bytes]) -> None:
    with suppress(ValueError):  # the caller closed the stream
        while line := stream.readline(1 << 16):
            last_lines.append(line)


def _lines(descriptor: int, check: Callable[[], None] | None) -> Iterator[bytes]:
    """Yield what a child writes, line by line."""
    buffer = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(descriptor, selectors.EVENT_READ)
        while True:
            if check is not None:
                check()
            if not ready.select(CHECK_INTERVAL_S):
                continue
            data = os.read(descriptor, 1 << 16)
            buffer += data
            *lines, rest = buffer.split(b"\n") if b"\n" in data else (buffer,)
            yield from map(bytes, lines)
            buffer = rest
            if not data or len(buffer) > MAX_REPLY_BYTES:
                return


def _read_reply(lines: Iterable[bytes], progress: Progress | None) -> Any:
    for line in lines:
        reply = json.loads(line)
        if "result" in reply:
            return reply["result"]
        if "error" in reply:
            raise error_from(reply["error"])
        if progress is not None:
            progress(*reply["progress"])
    raise _NoReplyError


def apply_sandbox(verb: str, arguments: dict[str, Any]) -> bool:
    """Limit this process before it runs `verb`. Return True if its network is cut off, or if the tool needs one."""
    if any("://" in value for value in arguments.values() if isinstance(value, str)):
        sandbox.without_privileges()
        return True
    offline = sandbox.isolate()
    limits = TOOLS[verb].limits if verb in TOOLS else Limits.NONE
    if limits is not Limits.NONE:
        import_module(TOOLS[verb].module)
        sandbox.apply_limits()
    if limits in (Limits.MANIFEST, Limits.MANIFEST_AND_BYTES):
        # A quarter of the maximum: parsed text takes less than ten times its size.
        data_bytes = 1 << 44 if limits is Limits.MANIFEST_AND_BYTES else 0
        sandbox.raise_limits(metadata_bytes=MAX_MANIFEST_BYTES // 4, data_bytes=data_bytes)
    return offline


def limit_error(verb: str) -> dict[str, Any]:
    """The error that a process reports when it has reached its memory limit."""
    message = f"`{verb}` needs more memory than a file of this size should need"
    error = workers.errors.CheckpointError(message, "check that the file is in the format you named")
    return {"kind": "CheckpointError", "arguments": list(error.args), "message": str(error)}


def error_from(failure: dict[str, Any]) -> PolyfleetError:
    """Rebuild an error that another process reported. An unknown class becomes a FleetError."""
    kinds = {**vars(cluster.errors), **vars(workers.errors), "DamagedCheckpoint": DamagedCheckpoint}
    kind = kinds.get(str(failure["kind"]), FleetError)
    try:
        error: PolyfleetError = kind(*failure["arguments"])
    except TypeError:
        error = FleetError(failure["message"])
    return error


def _environment() -> dict[str, str]:
    """This process's environment without the fleet's tokens, which no tool needs. A copy needs object store
    credentials.
    """
    ours = {k: v for k, v in os.environ.items() if not (k.startswith(("POLYFLEET_", "RAY_")) and k.endswith(TOKENS))}
    path = ours.get("PYTHONPATH", "")
    return ours | {"PYTHONPATH": f"{CODE}{os.pathsep}{path}" if path else CODE}
