"""Entry point of a rank of prepare, train or benchmark: `python -m workers.tasks.rank_main`.

Its environment says what to do. Our modules are imported before the user's folder is put first on sys.path, so that no
file of the user's can replace them.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import workers
from cluster.errors import PolyfleetError, UserError
from cluster.input.untrusted_files import UnreadableFile, parse_json
from workers.errors import AttemptReplaced, NonFiniteValue
from workers.processes import disk_full
from workers.protocol.folders import MAX_RESULT_BYTES, SharedFolder, read_json, write_json
from workers.protocol.rank_progress import SIGNAL
from workers.protocol.redaction import Redactor
from workers.protocol.reserved_files import is_full, replace_or_use_reserve

CODE = Path(workers.__file__).parents[1]
OUR_FOLDERS = tuple(str(CODE / name) + os.sep for name in ("cluster", "workers", "orchestrator"))
STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
LIBRARIES = ("torch", "torch_xla", "intel_extension_for_pytorch", "numpy", "safetensors")
INTERRUPTED = 130
OUT_OF_MEMORY = ("OutOfMemoryError", "OutOfDeviceMemory", "MemoryError")
OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "RESOURCE_EXHAUSTED")


def main() -> int:
    folder, rank = SharedFolder(Path(os.environ["POLYFLEET_ATTEMPT_DIR"])), int(os.environ["RANK"])
    redact = Redactor.for_rank(os.environ)
    _register_stacks(folder.stacks(rank))
    try:
        result = _run_task(folder, rank)
        if rank == 0:
            replace_or_use_reserve(folder.result, json.dumps(redact.clean_data(_check_result(result))))
    except SystemExit as e:
        return _exit_code(e)
    except BaseException as e:
        failure = failure_record(e, rank)
        print(failure["traceback"] or failure["message"], file=sys.stderr)  # noqa: T201 - the rank's log is its stderr
        with suppress(OSError):  # on a full disk the supervisor uses the exit code and the last line of our stderr
            write_json(folder.failure(rank), redact.clean_data(failure, keys=False))
        return INTERRUPTED if isinstance(e, KeyboardInterrupt) else 1
    return 0


def _register_stacks(path: Path) -> None:
    """Write the stacks of all threads to `path` at each SIGNAL of the supervisor, even if the GIL is held.

    At exit the interpreter restores the previous handler. That must be SIG_IGN, or a late signal would kill the rank.
    """
    with suppress(OSError):
        signal.signal(SIGNAL, signal.SIG_IGN)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)


def _run_task(folder: SharedFolder, rank: int) -> dict[str, Any]:
    order = read_json(folder.shared_order)
    task = importlib.import_module(f"workers.tasks.{order['task']}")
    context = importlib.import_module("workers.tasks.context").Context.from_attempt(folder.shared, rank, order)
    sys.path.insert(0, str(folder.work(rank)))
    result: dict[str, Any] = task.main(context)
    # Not written after sys.exit: the exit may be due to a stop request. `sigterm` shows whether our handler has run.
    context.events.write("note", done=True, sigterm=context.stop.requested)
    return result


def _check_result(result: Any) -> Any:
    """Return the result. Raises UserError if it cannot be written as JSON or is too large to be read."""
    try:
        text = json.dumps(result).encode()
        parse_json(text, "the task's result")
    except (TypeError, ValueError, RecursionError, UnreadableFile) as e:
        reason = e.reason if isinstance(e, UnreadableFile) else f"cannot be written as JSON: {e}"
        raise UserError(f"the task's result {reason}", "return numbers, strings, lists and dicts") from None
    if len(text) > MAX_RESULT_BYTES:
        message = (
            f"the task's result has {len(text) / 2**20:.1f} MiB as JSON; the maximum is {MAX_RESULT_BYTES >> 20} MiB"
        )
        raise UserError(message, "write large values to a file or checkpoint and return its path")
    return result


def _exit_code(e: SystemExit) -> int:
    """Exit code as the interpreter would choose it: None is 0; text is printed to stderr and gives 1."""
    if e.code is None or isinstance(e.code, int):
        return e.code or 0
    print(e.code, file=sys.stderr)  # noqa: T201
    return 1


def failure_record(e: BaseException, rank: int) -> dict[str, Any]:
    """Return a Failure as plain data.

    Its traceback has the user's frames and those of libraries, without ours. An exception that never passed through
    user code is a bug of ours: it keeps all frames and has kind `internal`.
    """
    trace = traceback.TracebackException.from_exception(e)
    in_user_code = isinstance(e, SyntaxError) or any(_is_user_code(frame.filename) for frame in trace.stack)
    is_our_error = isinstance(e, PolyfleetError)
    kind = _kind(e) or ("user" if in_user_code or is_our_error else "internal")
    if kind != "internal":
        _drop_our_frames(trace)
    message = str(e) if is_our_error else "".join(trace.format_exception_only()).strip()
    return {
        "rank": rank,
        "node": "",
        "kind": kind,
        "message": "; ".join(filter(None, (message, _disk(e) if kind == "storage" else ""))),
        "traceback": "".join(trace.format()) if in_user_code or kind == "internal" else "",
        "exit_code": 1,
    }


def _drop_our_frames(trace: traceback.TracebackException) -> None:
    """Drop our frames from a traceback and from those of all its causes."""
    trace.stack[:] = [frame for frame in trace.stack if not _is_ours(frame.filename)]
    for cause in (trace.__cause__, trace.__context__):
        if cause is not None:
            _drop_our_frames(cause)


def _is_ours(filename: str) -> bool:
    """Return whether a frame is of our code, or of Python's own code that runs and imports modules."""
    return filename.startswith((*OUR_FOLDERS, "<frozen ")) or filename.endswith(
        (f"{os.sep}runpy.py", f"importlib{os.sep}__init__.py")
    )


def _is_user_code(filename: str) -> bool:
    """Return whether a frame is of user code: not ours, and not of a library that we call ourselves."""
    if _is_ours(filename):
        return False
    _, site_packages, relative_path = filename.rpartition(f"{os.sep}site-packages{os.sep}")
    return Path(relative_path).parts[0] not in LIBRARIES if site_packages else not filename.startswith(STANDARD_LIBRARY)


def _kind(e: BaseException) -> str:
    """Kind of a failure with a special cause; "" for any other error."""
    if isinstance(e, NonFiniteValue):
        return "nan"
    if any(isinstance(exception, AttemptReplaced) for exception in _chain(e)):
        return "lost"
    if _is_out_of_memory(e):
        return "oom"
    # not at the top: it is loaded already if it was raised
    from workers.checkpoint.format.manifest import DamagedCheckpoint

    if isinstance(e, DamagedCheckpoint):
        return "storage"
    has_full_error = any(isinstance(exception, OSError) and is_full(exception) for exception in _chain(e))
    mentions_full = isinstance(e, OSError | RuntimeError | PolyfleetError) and disk_full.mentions_full_disk(str(e))
    return "storage" if has_full_error or mentions_full else ""


def _chain(e: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and all its causes."""
    visited: set[int] = set()
    while e is not None and id(e) not in visited:
        visited.add(id(e))
        yield e
        e = e.__cause__ or e.__context__


def _disk(e: BaseException) -> str:
    """Describe the file system of the file that the error names, else the first full one."""
    filenames = [
        str(exception.filename)
        for exception in _chain(e)
        if isinstance(exception, OSError) and isinstance(exception.filename, str)
    ]
    if filenames:
        return disk_full.describe(filenames[0])
    folders = [os.getcwd(), os.environ.get("POLYFLEET_CHECKPOINT_DIR", ""), tempfile.gettempdir(), "/dev/shm"]  # noqa: PTH109, S108
    return disk_full.describe_full_disk(filter(None, folders))


def _is_out_of_memory(e: BaseException) -> bool:
    names = {cls.__name__ for cls in type(e).__mro__}
    return bool(names & set(OUT_OF_MEMORY)) or (
        isinstance(e, RuntimeError) and any(text in str(e) for text in OUT_OF_MEMORY_TEXTS)
    )


def exit_process(code: int) -> None:
    """Exit. After a failure without cleanup: gloo's threads abort an interpreter that is shutting down."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code:
        os._exit(code)
    sys.exit(0)


if __name__ == "__main__":
    exit_process(main())
