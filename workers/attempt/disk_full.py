"""File systems that are full, and the errors that say so. Standard library only."""

import os
from collections.abc import Iterable
from pathlib import Path

from workers.attempt.oom import size

WORDS = ("No space left on device", "Disk quota exceeded", "[Errno 28]", "[Errno 122]", "os error 28", "os error 122")
"""As libc, Python and Rust say ENOSPC and EDQUOT."""
FULL_BYTES = 128 << 10
"""What is left where a program has just failed to write: less than it needed, hardly ever nothing."""


def mentions_full_disk(text: str) -> bool:
    return any(word in text for word in WORDS)


def full_disk(paths: Iterable[str | Path]) -> str:
    """The first full file system among those of `paths`, in words; "" when each has space."""
    return next(filter(None, (described(path, FULL_BYTES) for path in paths)), "")


def described(path: str | Path, least_bytes: int = 1 << 62) -> str:
    """How much is free where `path` lies, in words; "" where that is `least_bytes` or more, or cannot be known."""
    here = Path(path)
    while not os.path.lexists(here) and here != here.parent:
        here = here.parent
    try:
        found = os.statvfs(here)
    except OSError:
        return ""
    free, whole = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    if found.f_files and not found.f_favail:
        return f"the file system of {_mount(here)} is full: 0 of {found.f_files} files are free"
    if not whole or free >= least_bytes:
        return ""
    left = f"{_precise(free)} of {_precise(whole)}"
    name = f"the file system of {_mount(here)}"
    return f"{name} is full: {left} are free" if free < FULL_BYTES else f"{name} has {left} free"


def _mount(here: Path) -> Path:
    """The folder that the file system is mounted at."""
    try:
        device = here.stat().st_dev
        while here != here.parent and here.parent.stat().st_dev == device:
            here = here.parent
    except OSError:
        return here
    return here


def _precise(number: int) -> str:
    if number < 1 << 20:
        return f"{number} bytes"
    return f"{number / 2**20:.1f} MiB" if number < 1 << 30 else size(number)
