"""Lock files, held by a process and the children that inherit the descriptor.

The kernel releases a lock when all of them have ended. A lock file is never removed: another process could then hold a
lock on a file that no longer has a name.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[int]:
    """Lock `path` and yield the descriptor to pass on.

    If another process holds it, call `on_wait` and wait.
    """
    with path.open("w") as file:
        acquire_or_wait(file.fileno(), on_wait)
        yield file.fileno()


def acquire_or_wait(descriptor: int, on_wait: Callable[[], None]) -> None:
    """Lock the open file until its descriptor is closed.

    If another process holds the lock, call `on_wait` and wait.
    """
    if not acquire(descriptor):
        on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextmanager
def try_exclusive(path: Path) -> Iterator[int | None]:
    """Lock `path` and yield its descriptor, or yield None at once if another process holds it."""
    with path.open("w") as file:
        yield file.fileno() if acquire(file) else None


def is_locked(path: Path) -> bool:
    """Return whether a process holds `path` now."""
    with try_exclusive(path) as descriptor:
        return descriptor is None


def acquire(file: IO[Any] | int) -> bool:
    """Lock the open `file`, or descriptor, until it is closed. Return False if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release(descriptor: int) -> None:
    """Unlock the open file at once. Closing it would not: a child that another thread starts just now still has the
    descriptor, until it executes its program.
    """
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def share_lock(lock: Path) -> int | None:
    """Take a shared lock on the file `lock`, until the returned descriptor is closed or this process ends.

    Returns None if the file does not exist, or was removed while this waited.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):  # a file system without locks: nothing is removed there either
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    with suppress(OSError):
        if lock.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    os.close(descriptor)
    return None
