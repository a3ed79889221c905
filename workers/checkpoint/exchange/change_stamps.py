"""Detect changes of files that a script writes, cheaply enough to check every second. Standard library only."""

import os
import stat
from pathlib import Path

from workers.errors import CheckpointError

MAX_FILES = 10_000
Stamp = tuple[tuple[str, int, int], ...]
"""Name, size and modification time of each file, in order."""


def stamp(path: Path | None) -> Stamp:
    """Return the stamp of a file, or of all files of a folder; empty if there are none, or too many."""
    if path is None:
        return ()
    try:
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode):
            return (("", status.st_size, status.st_mtime_ns),)
        return tuple(sorted(_below(path))) if stat.S_ISDIR(status.st_mode) else ()
    except OSError:  # it was deleted while it was read
        return ()


def _below(path: Path) -> list[tuple[str, int, int]]:
    rows = []
    for folder, _, names in os.walk(path):
        for file in (Path(folder, name) for name in names):
            status = file.lstat()
            if stat.S_ISREG(status.st_mode):
                rows.append((str(file.relative_to(path)), status.st_size, status.st_mtime_ns))
        if len(rows) > MAX_FILES:
            return []
    return rows


def inside(folder: Path, path: str) -> Path:
    """Return `path` below `folder`. Raises CheckpointError if a folder between them is a link."""
    target = folder / path
    for above in [parent for parent in target.parents if parent.is_relative_to(folder) and parent != folder]:
        if above.is_symlink():
            raise CheckpointError(f"{path}: {above.name} is a link", "links are not followed")
    return target
