"""Deleting by hand what `keep` deletes by itself: older checkpoints that a newer, verified one makes superfluous."""

import shutil
from pathlib import Path
from typing import Any

from cluster.errors import NotFound, UserError
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.pins import pin, unpin
from workers.checkpoint.disk.retention import expired_checkpoints, first_damage, remove_checkpoint, unfinished_saves
from workers.checkpoint.disk.writer_lock import writer_lock
from workers.checkpoint.format.step_folders import newest_first
from workers.checkpoint.inspect import checkpoint_folder
from workers.errors import CheckpointError

CONVERTING = ".converting-"


def pin_one(path: str | Path, *, remove: bool = False) -> dict[str, Any]:
    """Pin a checkpoint, so that nothing prunes it, or take its pin away: {"path", "pinned"}."""
    folder = checkpoint_folder(path)
    (unpin if remove else pin)(folder)
    return {"path": str(folder), "pinned": not remove}


def discard(path: str | Path) -> dict[str, Any]:
    """Remove a folder in which a conversion was kept until it was copied. Raises UserError for any other folder."""
    folder = Path(path)
    if not folder.name.startswith(CONVERTING):
        raise UserError(f"{folder} is no folder {CONVERTING}…", "prune deletes checkpoints")
    for one in newest_first(folder):
        remove_checkpoint(Files(), one)
    shutil.rmtree(folder, ignore_errors=True)
    return {"path": str(folder)}


def prune(root: str | Path, keep: int, *, dry_run: bool = False) -> dict[str, Any]:
    """{"root", "kept", "deleted": [names], "bytes", "dry_run"}. Keeps the `keep` newest sound checkpoints of a folder.

    The newest whose every byte verifies counts as the first; damaged ones newer than that are left for a person to look
    at, and pinned ones stay. What dead writers left unfinished goes too. Raises UserError, NotFound, Conflict with a
    writer, CheckpointError where none verifies.
    """
    if keep < 1:
        raise UserError(f"keep is {keep}", "keep at least 1 checkpoint")
    folder = Path(root)
    found = newest_first(folder)
    if not found:
        raise NotFound(f"no checkpoint in {folder}", "name the folder that holds the step-… folders")
    newest = next((one for one in found if not first_damage(one)), None)
    if newest is None:
        raise CheckpointError(f"none of the {len(found)} checkpoints in {folder} is sound: nothing was deleted")
    doomed = expired_checkpoints(found[found.index(newest) + 1 :], keep) + unfinished_saves(folder)
    size_bytes = sum(path.lstat().st_size for one in doomed for path in one.iterdir())
    if not dry_run:
        with writer_lock(folder):
            for one in doomed:
                remove_checkpoint(Files(), one)
    return {
        "root": str(folder),
        "kept": [one.name for one in found if one not in doomed],
        "deleted": [one.name for one in doomed],
        "bytes": size_bytes,
        "dry_run": dry_run,
    }
