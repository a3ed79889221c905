"""Mark damaged checkpoints, so that nothing resumes from them and users see the reason.

The mark is a file beside the manifest, not part of it. The checkpoint stays where it is; `verify` removes the mark if
the checkpoint turns out to be sound.
"""

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cluster.input.untrusted_files import UnreadableFile, read_json
from workers.checkpoint.format.manifest import FOLDER

MARK = ".damaged"
MAX_MARK_BYTES = 16 << 10
MAX_REASON_LENGTH = 1000


def mark_damaged(folder: Path, reason: str) -> None:
    """Mark a checkpoint as damaged. Raises OSError if the mark cannot be written."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    part = folder / f"{MARK}.{secrets.token_hex(4)}"
    with part.open("x") as file:
        json.dump({"reason": reason[:MAX_REASON_LENGTH], "found": time}, file)
    part.rename(folder / MARK)


def clear_damage(folder: Path) -> None:
    """Remove the mark. Raises OSError if that fails."""
    (folder / MARK).unlink(missing_ok=True)


def record_verification(folder: Path, problems: Sequence[str]) -> None:
    """Mark the checkpoint or remove its mark after every byte was read, if the folder is writable."""
    with suppress(OSError):
        mark_damaged(folder, problems[0]) if problems else clear_damage(folder)


def damage_reason(folder: Path) -> str:
    """Return why a checkpoint is marked, in a sentence, or "" if it is not."""
    if not os.path.lexists(folder / MARK):
        return ""
    mark = None
    with suppress(UnreadableFile, FileNotFoundError):
        mark = read_json(folder / MARK, MAX_MARK_BYTES)
    if not isinstance(mark, dict) or not isinstance(mark.get("reason"), str) or not isinstance(mark.get("found"), str):
        return "it is marked as damaged"
    return f"{mark['reason'][:MAX_REASON_LENGTH]} (detected {mark['found'][:40]})"


def damaged_checkpoints(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield marked checkpoints at any depth with the reason. No manifest is read."""
    for parent, names, _ in os.walk(root):
        steps = [name for name in names if FOLDER.fullmatch(name)]
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in steps)
        folders = [Path(parent, name) for name in sorted(steps)]
        yield from (
            (folder, reason) for folder in folders if not folder.is_symlink() and (reason := damage_reason(folder))
        )
