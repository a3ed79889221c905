"""Checkpoints that were found damaged carry a mark, a file beside the manifest and no part of it: nothing resumes from
them again, and who looks at them reads why. They stay where they are; `verify` takes the mark off one that is sound.
"""

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cluster.untrusted_files import UnreadableFile, read_json
from workers.checkpoint.format.manifest import FOLDER

MARK = ".damaged"
LONGEST_MARK_BYTES = 16 << 10
LONGEST_REASON = 1000


def mark_damaged(folder: Path, reason: str) -> None:
    """Raises OSError where the mark cannot be written."""
    found = datetime.now(UTC).isoformat(timespec="seconds")
    part = folder / f"{MARK}.{secrets.token_hex(4)}"
    with part.open("x") as file:
        json.dump({"reason": reason[:LONGEST_REASON], "found": found}, file)
    part.rename(folder / MARK)


def clear_damage(folder: Path) -> None:
    """Raises OSError where the mark cannot be taken off."""
    (folder / MARK).unlink(missing_ok=True)


def record_verification(folder: Path, problems: Sequence[str]) -> None:
    """After every byte was read: mark it, or take a mark off, where this folder can be written."""
    with suppress(OSError):
        mark_damaged(folder, problems[0]) if problems else clear_damage(folder)


def damage_reason(folder: Path) -> str:
    """Why a checkpoint is marked, in a sentence; "" where it is not."""
    if not os.path.lexists(folder / MARK):
        return ""
    told = None
    with suppress(UnreadableFile, FileNotFoundError):
        told = read_json(folder / MARK, LONGEST_MARK_BYTES)
    if not isinstance(told, dict) or not isinstance(told.get("reason"), str) or not isinstance(told.get("found"), str):
        return "it is marked as damaged"
    return f"{told['reason'][:LONGEST_REASON]} (found {told['found'][:40]})"


def damaged_checkpoints(root: Path) -> Iterator[tuple[Path, str]]:
    """Checkpoints at any depth that are marked, with why. No manifest is read."""
    for parent, names, _ in os.walk(root):
        steps = [name for name in names if FOLDER.fullmatch(name)]
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in steps)
        folders = [Path(parent, name) for name in sorted(steps)]
        yield from ((folder, why) for folder in folders if not folder.is_symlink() and (why := damage_reason(folder)))
