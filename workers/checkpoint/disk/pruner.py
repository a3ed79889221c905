"""Delete older checkpoints on request, by the rules that `keep` applies when saving."""

import shutil
from pathlib import Path
from typing import Any

from cluster.errors import NotFound, UserError
from workers.checkpoint.disk.commit import writer_lock
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.inspect import checkpoint_folder
from workers.checkpoint.disk.pins import pin, unpin
from workers.checkpoint.disk.retention import expired_checkpoints, first_damage, remove_checkpoint, unfinished_saves
from workers.checkpoint.format.step_folders import newest_first
from workers.errors import CheckpointError

CONVERSION_PREFIX = ".converting-"


def pin_one(path: str | Path, *, remove: bool = False) -> dict[str, Any]:
    """Pin a checkpoint, so that it is never pruned, or remove its pin: {"path", "pinned"}."""
    folder = checkpoint_folder(path)
    (unpin if remove else pin)(folder)
    return {"path": str(folder), "pinned": not remove}


def discard(path: str | Path) -> dict[str, Any]:
    """Remove the temporary folder of a conversion after it was copied. Raises UserError for any other folder."""
    folder = Path(path)
    if not folder.name.startswith(CONVERSION_PREFIX):
        raise UserError(f"{folder} is not a {CONVERSION_PREFIX}… folder", "use prune to delete checkpoints")
    for checkpoint in newest_first(folder):
        remove_checkpoint(Files(), checkpoint)
    shutil.rmtree(folder, ignore_errors=True)
    return {"path": str(folder)}


def prune(root: str | Path, keep: int, *, dry_run: bool = False) -> dict[str, Any]:
    """Delete old checkpoints: {"root", "kept", "deleted": [names], "bytes", "dry_run"}.

    Keeps the `keep` newest sound checkpoints of a folder. The first of them is the newest of which every byte verifies;
    damaged ones newer than that are left for inspection, and pinned ones stay. Leftovers of dead writers are deleted
    too. Raises UserError, NotFound, Conflict with a writer, CheckpointError if none verifies.
    """
    if keep < 1:
        raise UserError(f"keep is {keep}", "keep at least 1 checkpoint")
    folder = Path(root)
    folders = newest_first(folder)
    if not folders:
        raise NotFound(f"no checkpoint in {folder}", "name the folder that holds the step-… folders")
    newest = next((checkpoint for checkpoint in folders if not first_damage(checkpoint)), None)
    if newest is None:
        raise CheckpointError(f"none of the {len(folders)} checkpoints in {folder} is sound: nothing was deleted")
    expired = expired_checkpoints(folders[folders.index(newest) + 1 :], keep) + unfinished_saves(folder)
    size_bytes = sum(path.lstat().st_size for checkpoint in expired for path in checkpoint.iterdir())
    if not dry_run:
        with writer_lock(folder):
            for checkpoint in expired:
                remove_checkpoint(Files(), checkpoint)
    return {
        "root": str(folder),
        "kept": [checkpoint.name for checkpoint in folders if checkpoint not in expired],
        "deleted": [checkpoint.name for checkpoint in expired],
        "bytes": size_bytes,
        "dry_run": dry_run,
    }
