"""Lock files: held by a process and the children it hands the descriptor to; the kernel frees them when all have ended.

A lock file is never removed: another could then hold a lock on a file that no longer has a name.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def exclusive(path: Path, when_taken: Callable[[], None]) -> Iterator[int]:
    """Hold `path`; where somebody else does, say so by `when_taken` and wait. Yields the descriptor to hand on."""
    with path.open("w") as file:
        wait_for(file.fileno(), when_taken)
        yield file.fileno()


def wait_for(descriptor: int, when_taken: Callable[[], None]) -> None:
    """Lock the open file until its descriptor is closed. Where another process holds the lock, call `when_taken` first
    and wait.
    """
    if not acquire(descriptor):
        when_taken()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextmanager
def try_exclusive(path: Path) -> Iterator[int | None]:
    """Hold `path` and yield its descriptor, or yield None at once where somebody else holds it."""
    with path.open("w") as file:
        yield file.fileno() if acquire(file) else None


def is_locked(path: Path) -> bool:
    """Whether a process holds `path` now."""
    with try_exclusive(path) as descriptor:
        return descriptor is None


def acquire(file: IO[Any] | int) -> bool:
    """Hold the open `file`, or descriptor, until it is closed; False where somebody else holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold(lock: Path) -> int | None:
    """A descriptor that shares the lock of the file `lock` until it is closed or its process ends; None where the file
    is gone, also meanwhile.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):  # a file system without locks: there nothing is removed either
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    with suppress(OSError):
        if lock.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    os.close(descriptor)
    return None
