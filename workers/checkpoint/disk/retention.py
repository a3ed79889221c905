"""Decide what is deleted: checkpoints that newer ones replace, and leftovers of writers that died."""

import os
import time
from pathlib import Path

from workers.checkpoint.disk.damage_marks import damage_reason
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.pins import is_held, is_pinned
from workers.checkpoint.disk.reader import CheckpointReader
from workers.checkpoint.format.manifest import NAME, Producer
from workers.checkpoint.format.manifest_checks import read_json
from workers.checkpoint.format.step_folders import is_committed, is_complete, newest_first, step_of
from workers.errors import CheckpointError

LEFTOVER_AGE_S = 3600
"""Age after which an unfinished folder without new writes counts as a dead writer's. A slower writer's save fails."""
INCOMING_AGE_S = 7 * 86400
"""Age after which the remains of an interrupted copy are deleted; until then the next try resumes from them."""
PART, INCOMING = ".part-", ".incoming-"


def apply_retention(files: Files, root: Path, keep: int, newest: Path) -> tuple[str, ...]:
    """Keep `newest`, the `keep - 1` newest other complete checkpoints, and pinned ones. Return what could not be
    deleted.

    Before anything older is deleted, every byte of `newest` is read back from the disk and compared.
    """
    notes = []
    try:
        expired = expired_checkpoints([folder for folder in newest_first(root) if folder != newest], keep)
        if expired and (fault := first_damage(newest)):
            expired, notes = [], [f"nothing older was deleted: {fault}"]
        expired += unfinished_saves(root)
    except OSError as e:
        return (f"older checkpoints in {root} could not be listed: {e.strerror or e}",)
    for folder in expired:
        try:
            remove_checkpoint(files, folder)
        except OSError as e:
            notes.append(f"{folder} could not be deleted: {e.strerror or e}")
    return tuple(notes)


def remove_checkpoint(files: Files, folder: Path) -> None:
    """Delete the manifest first and durably, so that a half deleted checkpoint never looks complete."""
    if os.path.lexists(folder / NAME):
        files.remove(folder / NAME)
        files.sync_folder(folder)
    for path in sorted(folder.iterdir()):
        files.remove(path)
    files.remove_folder(folder)


def check_attempt_is_newest(root: Path, producer: Producer) -> None:
    """Raise CheckpointError if a later attempt of the same job has saved: this attempt was replaced."""
    if not producer.job:
        return
    for folder in newest_first(root):
        try:
            other = read_json(folder)["producer"]
            replaced = other["job"] == producer.job and other["epoch"] > producer.epoch
        except (CheckpointError, LookupError, TypeError):
            continue  # a damaged manifest does not show that this attempt was replaced
        if replaced:
            raise CheckpointError(
                f"attempt {producer.epoch} of job {producer.job} may not save:"
                f" attempt {other['epoch']} has saved {folder.name}",
                "nothing to do: the job continues in a newer attempt",
            )


def first_damage(folder: Path) -> str:
    """Return what is wrong with a checkpoint, "" if every byte is as it was saved."""
    try:
        with CheckpointReader(folder) as reader:
            return next((fault.message for fault in reader.damaged_chunks()), "")
    except CheckpointError as e:
        return e.message


def expired_checkpoints(others: list[Path], keep: int) -> list[Path]:
    """Return which of `others` (newest first) `keep` deletes, besides one newer checkpoint that stays.
    Pinned ones stay and are not counted; held ones stay until the next call.
    """
    retained, expired = 1, []
    for folder in others:
        if is_pinned(folder):
            continue
        if retained >= keep:
            expired += [] if is_held(folder) else [folder]
        elif is_complete(folder) and not damage_reason(folder):
            retained += 1
    return expired


def unfinished_saves(root: Path) -> list[Path]:
    """Unfinished folders that have not been written to for so long that their writer must be dead."""
    folders = [folder for folder in root.iterdir() if folder.is_dir() and not folder.is_symlink()]
    return sorted(folder for folder in folders if _unfinished(folder) and _age_s(folder) > _max_age_s(folder))


def _unfinished(folder: Path) -> bool:
    name = folder.name.removeprefix(PART).removeprefix(INCOMING)
    return step_of(folder.with_name(name)) >= 0 and not is_committed(folder)


def _max_age_s(folder: Path) -> float:
    return INCOMING_AGE_S if folder.name.startswith(INCOMING) else LEFTOVER_AGE_S


def _age_s(folder: Path) -> float:
    touched_s = max(os.lstat(path).st_mtime for path in (folder, *folder.iterdir()))
    return time.time() - touched_s
