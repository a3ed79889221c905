"""Detect full file systems and the error messages that report them. Standard library only."""

import os
from collections.abc import Iterable
from pathlib import Path

from workers.processes.oom import format_size

FULL_DISK_TEXTS = (
    "No space left on device",
    "Disk quota exceeded",
    "[Errno 28]",
    "[Errno 122]",
    "os error 28",
    "os error 122",
)
"""ENOSPC and EDQUOT as libc, Python and Rust print them."""
FULL_BYTES = 128 << 10
"""A file system with less free counts as full. Where a write has just failed, some space is nearly always left."""


def mentions_full_disk(text: str) -> bool:
    return any(pattern in text for pattern in FULL_DISK_TEXTS)


def describe_full_disk(paths: Iterable[str | Path]) -> str:
    """Describe the first full file system among those of `paths`; "" if all have space."""
    return next(filter(None, (describe(path, FULL_BYTES) for path in paths)), "")


def describe(path: str | Path, least_bytes: int = 1 << 62) -> str:
    """Describe the free space of the file system of `path`; "" if it is `least_bytes` or more, or unknown."""
    folder = Path(path)
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        status = os.statvfs(folder)
    except OSError:
        return ""
    free_bytes, total_bytes = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    if status.f_files and not status.f_favail:
        return f"the file system of {_mount(folder)} is full: 0 of {status.f_files} files are free"
    if not total_bytes or free_bytes >= least_bytes:
        return ""
    free_text = f"{_format_bytes(free_bytes)} of {_format_bytes(total_bytes)}"
    name = f"the file system of {_mount(folder)}"
    return f"{name} is full: {free_text} are free" if free_bytes < FULL_BYTES else f"{name} has {free_text} free"


def _mount(folder: Path) -> Path:
    """The folder at which the file system of `folder` is mounted."""
    try:
        device = folder.stat().st_dev
        while folder != folder.parent and folder.parent.stat().st_dev == device:
            folder = folder.parent
    except OSError:
        return folder
    return folder


def _format_bytes(size_bytes: int) -> str:
    if size_bytes < 1 << 20:
        return f"{size_bytes} bytes"
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes < 1 << 30 else format_size(size_bytes)
