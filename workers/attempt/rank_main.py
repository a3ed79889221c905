"""A rank of prepare, train or benchmark: `python -m workers.attempt.rank_main`, told what to do by its environment.

Our modules are imported before the user's folder comes first on sys.path: no file of theirs can take their place.
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
from cluster.untrusted_files import UnreadableFile, parse_json
from workers.attempt import disk_full
from workers.attempt.folders import MOST_RESULT_BYTES, SharedFolder, read_json, write_json
from workers.attempt.hang_detector import SIGNAL
from workers.attempt.redaction import Redactor
from workers.attempt.reserved_files import is_full, replace_or_use_reserve
from workers.errors import AttemptReplaced, NonFiniteValue

CODE = Path(workers.__file__).parents[1]
OURS = tuple(str(CODE / name) + os.sep for name in ("cluster", "workers", "orchestrator"))
STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
LIBRARIES = ("torch", "torch_xla", "intel_extension_for_pytorch", "numpy", "safetensors")
INTERRUPTED = 130
OUT_OF_MEMORY = ("OutOfMemoryError", "OutOfDeviceMemory", "MemoryError")
OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "RESOURCE_EXHAUSTED")


def main() -> int:
    folder, rank = SharedFolder(Path(os.environ["POLYFLEET_ATTEMPT_DIR"])), int(os.environ["RANK"])
    redact = Redactor.of_rank(os.environ)
    _tell_stacks(folder.stacks(rank))
    try:
        result = _run_task(folder, rank)
        if rank == 0:
            replace_or_use_reserve(folder.result, json.dumps(redact.plain(_checked(result))))
    except SystemExit as e:
        return _exit_code(e)
    except BaseException as e:
        failure = failure_record(e, rank)
        print(failure["traceback"] or failure["message"], file=sys.stderr)  # noqa: T201 - the rank's log is its stderr
        with suppress(OSError):  # a full disk: the supervisor then has the exit code, and the last line of our stderr
            write_json(folder.failure(rank), redact.plain(failure, keys=False))
        return INTERRUPTED if isinstance(e, KeyboardInterrupt) else 1
    return 0


def _tell_stacks(path: Path) -> None:
    """From now on our supervisor can ask where our threads stand, also while they hold Python's lock.

    An interpreter that ends gives the signal back as it was before: unless ignored then, it would kill us.
    """
    with suppress(OSError):
        signal.signal(SIGNAL, signal.SIG_IGN)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)


def _run_task(folder: SharedFolder, rank: int) -> dict[str, Any]:
    order = read_json(folder.told)
    task = importlib.import_module(f"workers.tasks.{order['task']}")
    context = importlib.import_module("workers.tasks.context").Context.from_attempt(folder.shared, rank, order)
    sys.path.insert(0, str(folder.work(rank)))
    result: dict[str, Any] = task.main(context)
    # Code that ends by sys.exit was perhaps asked to stop, and so was code that put a handler of its own above ours.
    context.events.write("note", done=True, sigterm=context.stop.asked)
    return result


def _checked(result: Any) -> Any:
    """Raises UserError for a result that JSON cannot hold, or that nobody would read."""
    try:
        text = json.dumps(result).encode()
        parse_json(text, "the task's result")
    except (TypeError, ValueError, RecursionError, UnreadableFile) as e:
        why = e.why if isinstance(e, UnreadableFile) else f"cannot be written as JSON: {e}"
        raise UserError(f"the task's result {why}", "return numbers, strings, lists and dicts") from None
    if len(text) > MOST_RESULT_BYTES:
        told = (
            f"the task's result has {len(text) / 2**20:.1f} MiB as JSON; the maximum is {MOST_RESULT_BYTES >> 20} MiB"
        )
        raise UserError(told, "write large values to a file or checkpoint and return its path")
    return result


def _exit_code(e: SystemExit) -> int:
    """As the interpreter itself does it: None is 0, text goes to stderr and is 1."""
    if e.code is None or isinstance(e.code, int):
        return e.code or 0
    print(e.code, file=sys.stderr)  # noqa: T201
    return 1


def failure_record(e: BaseException, rank: int) -> dict[str, Any]:
    """A Failure as plain data: the user's frames and those of libraries they called, without ours.

    An exception that never passed through the user's code is ours to mend: it keeps all frames and is called internal.
    """
    whole = traceback.TracebackException.from_exception(e)
    users = isinstance(e, SyntaxError) or any(_is_users(frame.filename) for frame in whole.stack)
    said_on_purpose = isinstance(e, PolyfleetError)
    kind = _kind(e) or ("user" if users or said_on_purpose else "internal")
    if kind != "internal":
        _cut(whole)
    message = str(e) if said_on_purpose else "".join(whole.format_exception_only()).strip()
    return {
        "rank": rank,
        "node": "",
        "kind": kind,
        "message": "; ".join(filter(None, (message, _disk(e) if kind == "storage" else ""))),
        "traceback": "".join(whole.format()) if users or kind == "internal" else "",
        "exit_code": 1,
    }


def _cut(whole: traceback.TracebackException) -> None:
    """Drop our frames here and in every exception this one came from."""
    whole.stack[:] = [frame for frame in whole.stack if not _is_ours(frame.filename)]
    for earlier in (whole.__cause__, whole.__context__):
        if earlier is not None:
            _cut(earlier)


def _is_ours(filename: str) -> bool:
    """Ours, or the interpreter's machinery that runs and imports modules."""
    return filename.startswith((*OURS, "<frozen ")) or filename.endswith(
        (f"{os.sep}runpy.py", f"importlib{os.sep}__init__.py")
    )


def _is_users(filename: str) -> bool:
    """Neither ours nor of a library that we call ourselves."""
    if _is_ours(filename):
        return False
    _, installed, below = filename.rpartition(f"{os.sep}site-packages{os.sep}")
    return Path(below).parts[0] not in LIBRARIES if installed else not filename.startswith(STANDARD_LIBRARY)


def _kind(e: BaseException) -> str:
    """What is told apart from an error of the user's code; "" for that."""
    if isinstance(e, NonFiniteValue):
        return "nan"
    if any(isinstance(it, AttemptReplaced) for it in _chain(e)):
        return "lost"
    if _is_out_of_memory(e):
        return "oom"
    from workers.checkpoint.format.manifest import DamagedCheckpoint  # here: what raises it has imported it

    if isinstance(e, DamagedCheckpoint):
        return "storage"
    full = any(isinstance(it, OSError) and is_full(it) for it in _chain(e))
    told = isinstance(e, OSError | RuntimeError | PolyfleetError) and disk_full.mentions_full_disk(str(e))
    return "storage" if full or told else ""


def _chain(e: BaseException | None) -> Iterator[BaseException]:
    """It, and what it came from."""
    seen: set[int] = set()
    while e is not None and id(e) not in seen:
        seen.add(id(e))
        yield e
        e = e.__cause__ or e.__context__


def _disk(e: BaseException) -> str:
    """The file system that was written to: of the file that the error names, else the first full one."""
    named = [str(it.filename) for it in _chain(e) if isinstance(it, OSError) and isinstance(it.filename, str)]
    if named:
        return disk_full.described(named[0])
    places = [os.getcwd(), os.environ.get("POLYFLEET_CHECKPOINT_DIR", ""), tempfile.gettempdir(), "/dev/shm"]  # noqa: PTH109, S108
    return disk_full.full_disk(filter(None, places))


def _is_out_of_memory(e: BaseException) -> bool:
    names = {cls.__name__ for cls in type(e).__mro__}
    return bool(names & set(OUT_OF_MEMORY)) or (
        isinstance(e, RuntimeError) and any(text in str(e) for text in OUT_OF_MEMORY_TEXTS)
    )


def exit_process(code: int) -> None:
    """End this rank. After a failure at once: gloo's threads abort an interpreter that is taken down around them."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code:
        os._exit(code)
    sys.exit(0)


if __name__ == "__main__":
    exit_process(main())
