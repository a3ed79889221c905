"""What is deleted, and when: checkpoints a newer one made superfluous, and leftovers of writers that died."""

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
"""An unfinished folder nobody wrote to for an hour belongs to a dead writer. A slower one fails, no worse."""
INCOMING_AGE_S = 7 * 86400
"""What a copy left that was cut is kept for its next try, for a week."""
PART, INCOMING = ".part-", ".incoming-"


def apply_retention(files: Files, root: Path, keep: int, newest: Path) -> tuple[str, ...]:
    """Keep `newest`, the `keep - 1` newest other complete ones, and those pinned.

    Before anything older goes, every byte of `newest` is read back from the disk and compared. Answers with what could
    not be deleted, and why.
    """
    notes = []
    try:
        doomed = expired_checkpoints([folder for folder in newest_first(root) if folder != newest], keep)
        if doomed and (fault := first_damage(newest)):
            doomed, notes = [], [f"nothing older was deleted: {fault}"]
        doomed += unfinished_saves(root)
    except OSError as e:
        return (f"older checkpoints in {root} were not looked through: {e.strerror or e}",)
    for folder in doomed:
        try:
            remove_checkpoint(files, folder)
        except OSError as e:
            notes.append(f"{folder} could not be deleted: {e.strerror or e}")
    return tuple(notes)


def remove_checkpoint(files: Files, folder: Path) -> None:
    """Manifest first and durably, so that a half deleted checkpoint is never taken for a whole one."""
    if os.path.lexists(folder / NAME):
        files.remove(folder / NAME)
        files.sync_folder(folder)
    for path in sorted(folder.iterdir()):
        files.remove(path)
    files.remove_folder(folder)


def check_attempt_is_newest(root: Path, producer: Producer) -> None:
    """Raises CheckpointError where a later attempt of the same job has saved: this one was replaced."""
    if not producer.job:
        return
    for folder in newest_first(root):
        try:
            other = read_json(folder)["producer"]
            replaced = other["job"] == producer.job and other["epoch"] > producer.epoch
        except (CheckpointError, LookupError, TypeError):
            continue  # a damaged one proves nothing
        if replaced:
            raise CheckpointError(
                f"attempt {producer.epoch} of job {producer.job} may not save:"
                f" attempt {other['epoch']} has saved {folder.name}",
                "nothing to do: the job continues in a newer attempt",
            )


def first_damage(folder: Path) -> str:
    """What is wrong with a checkpoint, "" where every byte is as it was saved."""
    try:
        with CheckpointReader(folder) as reader:
            return next((fault.message for fault in reader.faults()), "")
    except CheckpointError as e:
        return e.message


def expired_checkpoints(others: list[Path], keep: int) -> list[Path]:
    """Of the others beside one that stays, newest first: what `keep` lets go. Pinned ones stay and do not count; held
    ones stay until the next time.
    """
    kept, doomed = 1, []
    for folder in others:
        if is_pinned(folder):
            continue
        if kept >= keep:
            doomed += [] if is_held(folder) else [folder]
        elif is_complete(folder) and not damage_reason(folder):
            kept += 1
    return doomed


def unfinished_saves(root: Path) -> list[Path]:
    """Unfinished folders that nobody has written to for so long that nobody will."""
    folders = [folder for folder in root.iterdir() if folder.is_dir() and not folder.is_symlink()]
    return sorted(folder for folder in folders if _unfinished(folder) and _age_s(folder) > _patience_s(folder))


def _unfinished(folder: Path) -> bool:
    name = folder.name.removeprefix(PART).removeprefix(INCOMING)
    return step_of(folder.with_name(name)) >= 0 and not is_committed(folder)


def _patience_s(folder: Path) -> float:
    return INCOMING_AGE_S if folder.name.startswith(INCOMING) else LEFTOVER_AGE_S


def _age_s(folder: Path) -> float:
    touched_s = max(os.lstat(path).st_mtime for path in (folder, *folder.iterdir()))
    return time.time() - touched_s
