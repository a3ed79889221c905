"""Which folders below a root are checkpoints, and in which order. Reads names and manifests, no shard."""

import os
from collections.abc import Iterator
from pathlib import Path

from workers.checkpoint.format import links
from workers.checkpoint.format.manifest import FOLDER, NAME
from workers.checkpoint.format.manifest_checks import read_json
from workers.errors import CheckpointError


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name, -1 for any other name."""
    match = FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else -1


def is_committed(folder: Path, follow_links: bool = False) -> bool:
    """Whether it is a checkpoint at all: without a manifest it is unfinished, and a link may lead anywhere, so one is a
    checkpoint only below what a user named (links.py)."""
    return step_of(folder) >= 0 and (follow_links or not folder.is_symlink()) and os.path.lexists(folder / NAME)


def newest_first(root: Path, follow_links: bool = False) -> list[Path]:
    """Committed checkpoints directly below `root`: highest step first, of equal steps the one committed last."""
    if not root.is_dir():
        return []
    order = {folder: _order(folder) for folder in root.iterdir() if is_committed(folder, follow_links)}
    return sorted((folder for folder in order if order[folder]), key=lambda folder: order[folder], reverse=True)


def checkpoints_below(root: Path, follow_links: bool = False) -> Iterator[Path]:
    """Committed checkpoints at any depth, those of one parent newest first. Only to a checkpoint itself is a link
    followed, so that none leads round in a circle."""
    for parent, names, _ in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and not FOLDER.fullmatch(name))
        yield from newest_first(Path(parent), follow_links)


def is_complete(folder: Path) -> bool:
    """Whether its manifest holds and all its files have the right size. Their content is not read."""
    try:
        files = read_json(folder)["files"]
        return all(links.size_bytes(folder / name) == file["bytes"] for name, file in files.items())
    except (CheckpointError, OSError, KeyError, TypeError, AttributeError):
        return False


def _order(folder: Path) -> tuple[int, int, str] | tuple[()]:
    try:
        return step_of(folder), os.lstat(folder / NAME).st_mtime_ns, folder.name
    except FileNotFoundError:  # deleted since it was listed: another writer keeps only the newest
        return ()
