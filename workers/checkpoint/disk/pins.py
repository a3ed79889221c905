"""Pinned checkpoints stay, however many newer ones there are; held ones for some minutes, while they are copied. A pin
is a file beside the manifest, no part of it, and so is a hold.
"""

import os
import time
from pathlib import Path

PIN = ".pinned"
HOLD = ".held"
HELD_S = 120.0
"""Whoever copies it renews its hold; one that ended leaves none for ever."""


def pin(folder: str | Path) -> None:
    """Keep a checkpoint for good."""
    (Path(folder) / PIN).touch()


def unpin(folder: str | Path) -> None:
    (Path(folder) / PIN).unlink(missing_ok=True)


def is_pinned(folder: Path) -> bool:
    return os.path.lexists(folder / PIN)


def hold(folder: Path) -> None:
    """Keep a checkpoint for HELD_S from now on. Raises OSError, also for a link that user code made there."""
    descriptor = os.open(folder / HOLD, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    try:
        return abs(time.time() - os.lstat(folder / HOLD).st_mtime) < HELD_S
    except OSError:
        return False
