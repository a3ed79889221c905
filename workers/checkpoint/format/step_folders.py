"""Find checkpoints below a root and sort them. Reads names and manifests, no shard."""

import os
from collections.abc import Iterator
from pathlib import Path

from workers.checkpoint.format import links
from workers.checkpoint.format.manifest import FOLDER, NAME
from workers.checkpoint.format.manifest_checks import read_json
from workers.errors import CheckpointError


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint folder's name, -1 for any other name."""
    match = FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else -1


def is_committed(folder: Path, follow_links: bool = False) -> bool:
    """Check whether a folder is a complete checkpoint: it has the right name and a manifest.
    A link may point anywhere, so one counts only below a path that the user named (links.py).
    """
    return step_of(folder) >= 0 and (follow_links or not folder.is_symlink()) and os.path.lexists(folder / NAME)


def newest_first(root: Path, follow_links: bool = False) -> list[Path]:
    """List committed checkpoints directly below `root`, highest step first, then the last committed."""
    if not root.is_dir():
        return []
    order = {folder: _order(folder) for folder in root.iterdir() if is_committed(folder, follow_links)}
    return sorted((folder for folder in order if order[folder]), key=lambda folder: order[folder], reverse=True)


def checkpoints_below(root: Path, follow_links: bool = False) -> Iterator[Path]:
    """Yield committed checkpoints at any depth, those of one parent newest first.
    Links are followed only to a checkpoint itself, so that the search cannot run in circles.
    """
    for parent, names, _ in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and not FOLDER.fullmatch(name))
        yield from newest_first(Path(parent), follow_links)


def is_complete(folder: Path) -> bool:
    """Check whether the manifest is valid and all files have the right size. Their content is not read."""
    try:
        files = read_json(folder)["files"]
        return all(links.size_bytes(folder / name) == file["bytes"] for name, file in files.items())
    except (CheckpointError, OSError, KeyError, TypeError, AttributeError):
        return False


def _order(folder: Path) -> tuple[int, int, str] | tuple[()]:
    try:
        return step_of(folder), os.lstat(folder / NAME).st_mtime_ns, folder.name
    except FileNotFoundError:  # another writer deleted it after it was listed
        return ()
