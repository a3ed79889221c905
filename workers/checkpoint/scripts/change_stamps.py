"""When something a script writes has changed: cheap enough for an agent to ask every second. Standard library only."""

import os
import stat
from pathlib import Path

from workers.errors import CheckpointError

MOST_FILES = 10_000
Stamp = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of each file, in order."""


def stamp(path: Path | None) -> Stamp:
    """Of a file, or of all files of a folder; empty where there is none, or where there are too many."""
    if path is None:
        return ()
    try:
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode):
            return (("", found.st_size, found.st_mtime_ns),)
        return tuple(sorted(_below(path))) if stat.S_ISDIR(found.st_mode) else ()
    except OSError:  # it vanishes meanwhile
        return ()


def _below(path: Path) -> list[tuple[str, int, int]]:
    rows = []
    for folder, _, names in os.walk(path):
        for one in (Path(folder, name) for name in names):
            found = one.lstat()
            if stat.S_ISREG(found.st_mode):
                rows.append((str(one.relative_to(path)), found.st_size, found.st_mtime_ns))
        if len(rows) > MOST_FILES:
            return []
    return rows


def inside(folder: Path, path: str) -> Path:
    """`path` below `folder`, where no folder on the way is a link. Raises CheckpointError."""
    target = folder / path
    for above in [one for one in target.parents if one.is_relative_to(folder) and one != folder]:
        if above.is_symlink():
            raise CheckpointError(f"{path}: {above.name} is a link", "links are not followed")
    return target
