"""What no reader may do with an input: take long, take much memory, write outside its folder, run anything.

One audit hook per process watches for the last two, also in threads; it does nothing while no input is being read.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HANG_S = 2.0
"""Of the process's CPU time: machines that test are busy. A reader that waits is stopped after BLOCKED_S."""
BLOCKED_S = 60.0
MEMORY_BYTES = 256 << 20
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
RUNNING = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn",
    "ctypes.dlopen", "ctypes.dlsym", "socket.connect", "socket.bind", "socket.getaddrinfo", "os.kill",
    "signal.pthread_kill",
)  # fmt: skip
CHANGING = {
    "os.mkdir": 1, "os.rmdir": 1, "os.remove": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2, "os.chmod": 1,
    "os.chown": 1, "os.truncate": 1, "shutil.rmtree": 1, "shutil.move": 2, "os.utime": 1, "os.setxattr": 1,
}  # fmt: skip
"""Events about paths, and how many of their first arguments are paths."""
LOADED_ON_FIRST_USE = ("encodings", "cluster", "workers", "orchestrator")


class Hang(BaseException):
    """Raised into a reader that takes longer than HANG_S; no reader catches it."""


@dataclass
class _Watch:
    sandbox: Path | None = None
    seen: str = ""


_watch = _Watch()
_hooked = False


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _watch.sandbox is None:
        return
    if event == "open":
        path, mode, flags = arguments
        writes = (isinstance(flags, int) and flags & WRITING) or (isinstance(mode, str) and set(mode) & set("wax+"))
        if writes and not _inside(path):
            _refuse(event, path)
    elif event in RUNNING:
        _refuse(event, arguments[:1])
    elif event in CHANGING:
        for path in arguments[: CHANGING[event]]:
            if not _inside(path):
                _refuse(event, path)
    elif event == "import":
        name = str(arguments[0])
        if name.partition(".")[0] not in (*LOADED_ON_FIRST_USE, *sys.stdlib_module_names, *_known):
            _refuse(event, name)
    elif event in ("exec", "compile"):
        code = arguments[0] if event == "exec" else None
        if getattr(code, "co_filename", "").startswith("<") and not getattr(code, "co_filename", "").startswith(
            "<frozen"
        ):
            _refuse(event, code)


_known: frozenset[str] = frozenset()


def _inside(path: object) -> bool:
    """Descriptors and names relative to one were reached through a path that was looked at."""
    if isinstance(path, int) or path is None:
        return True
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)
    return (
        not Path(text).is_absolute() or os.path.realpath(text).startswith(f"{_watch.sandbox}/") or text == "/dev/null"
    )


def _refuse(event: str, what: object) -> None:
    _watch.seen = f"{event} {what!r}"
    raise PermissionError(f"refused by the fuzzer: {_watch.seen}")


@contextmanager
def watched(sandbox: Path) -> Iterator[None]:
    """Around one input. Raises AssertionError for what a reader may not do, Hang when it takes too long."""
    global _hooked, _known
    if not _hooked:
        _known = frozenset(name.partition(".")[0] for name in sys.modules)
        sys.addaudithook(_hook)
        _hooked = True
    before = [(number, signal.signal(number, _late)) for number in (signal.SIGPROF, signal.SIGALRM)]
    high_bytes, started_s = _reset_peak(), time.process_time()
    _watch.sandbox, _watch.seen = sandbox.resolve(), ""
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    signal.setitimer(signal.ITIMER_REAL, BLOCKED_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _watch.sandbox = None
        for number, handler in before:
            signal.signal(number, handler)
        assert not _watch.seen, f"a reader did what it may not: {_watch.seen}"
        took_s, grown_bytes = time.process_time() - started_s, _peak_bytes() - high_bytes
        assert took_s < HANG_S, f"a reader took {took_s:.1f} s"
        assert grown_bytes < MEMORY_BYTES, f"a reader took {grown_bytes >> 20} MiB"


def _late(number: int, frame: object) -> None:
    raise Hang(f"a reader computed for {HANG_S} s" if number == signal.SIGPROF else f"a reader waited {BLOCKED_S} s")


def _reset_peak() -> int:
    """Peak memory counts from now on, so that no earlier test hides what a reader takes. The memory held now."""
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak (VmHWM) becomes what is resident
    return _peak_bytes()


def _peak_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def expected() -> type[Exception]:
    """The base of all errors that a reader may raise."""
    from cluster.errors import PolyfleetError

    return PolyfleetError


def judged(read: Callable[[bytes, Path], object], data: bytes, sandbox: Path) -> str:
    """ "accepted" or "refused" (an error of ours, or None); whatever else is raised is a failure and goes on up."""
    with watched(sandbox):
        try:
            return "refused" if read(data, sandbox) is None else "accepted"
        except expected():
            return "refused"
        except Hang as e:
            raise AssertionError(str(e)) from None
