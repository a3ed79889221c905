"""Protect checkpoints from pruning: pins until removed, holds for some minutes while they are copied.

Both are files beside the manifest, not part of it.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

PIN = ".pinned"
HOLD = ".held"
HOLD_S = 120.0
"""Seconds a hold lasts. The copying process renews it, so no hold outlives that process for long."""


def pin(folder: str | Path) -> None:
    """Protect a checkpoint from pruning until it is unpinned."""
    (Path(folder) / PIN).touch()


def unpin(folder: str | Path) -> None:
    (Path(folder) / PIN).unlink(missing_ok=True)


def is_pinned(folder: Path) -> bool:
    return os.path.lexists(folder / PIN)


def hold(folder: Path) -> int:
    """Protect a checkpoint for HOLD_S from now on. Raises OSError, also if user code put a link there.

    Returns the time of this hold, for `release`.
    """
    descriptor = os.open(folder / HOLD, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.utime(descriptor)
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def release(folder: Path, hold_time_ns: int) -> None:
    """End a hold before its time, unless another process has renewed it."""
    with suppress(FileNotFoundError):
        if os.lstat(folder / HOLD).st_mtime_ns == hold_time_ns:
            (folder / HOLD).unlink()


def is_held(folder: Path) -> bool:
    try:
        return abs(time.time() - os.lstat(folder / HOLD).st_mtime) < HOLD_S
    except OSError:
        return False
