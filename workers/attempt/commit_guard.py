"""Whether what an attempt does still counts: a rank asks before it commits or deletes a checkpoint.

A rank that was frozen cannot know for how long; its lease, whose clock goes on meanwhile, tells. And before a newer
attempt starts, whatever an older one has not finished is renamed: a rank that is frozen between its question and its
commit then finds nothing to commit.
"""

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from workers.attempt import fence, lease
from workers.attempt.folders import AttemptFolder, parse, read_json
from workers.attempt.process_tree import MARK
from workers.checkpoint.format.manifest import NAME
from workers.errors import AttemptReplaced

LOOK_EVERY_S = 0.1
UNFINISHED = re.compile(r"(?:\.part-)?(step-\d{8,}-)[0-9a-f]{8}", re.ASCII)


def check_not_replaced(environ: Mapping[str, str] = os.environ) -> None:
    """Raises AttemptReplaced in a process of an attempt that may have been. Elsewhere nothing can be.

    A fence alone may be lowered again, when a silent node is heard: it is waited for as long as the lease lasts.
    """
    while MARK in environ and (why := replaced_reason(Path(environ[MARK]))):
        if lease.expired(_folder(Path(environ[MARK])).lease):
            raise AttemptReplaced(
                f"this attempt was replaced and cannot save: {why}",
                "nothing to do: the job continues in a newer attempt",
            )
        time.sleep(LOOK_EVERY_S)


def replaced_reason(shared: Path) -> str:
    """Why the attempt whose ranks write into `shared` no longer counts; "" while it does."""
    attempt, folder = parse(shared.name), _folder(shared)
    past_s = lease.now_s() - lease.deadline_s(folder.lease)
    if attempt is None or past_s >= 0:
        return f"its lease ended {past_s:.1f} s ago" if lease.deadline_s(folder.lease) else "it has no lease"
    launch: Any = read_json(folder.launch)
    if isinstance(launch, dict) and launch.get("fences"):
        with suppress(fence.FenceUnreadable):
            epoch = fence.read_folder(Path(launch["fences"]), attempt.job)
            return f"attempt {epoch} of its job has superseded it" if epoch > attempt.epoch else ""
    return ""


def _folder(shared: Path) -> AttemptFolder:
    """The node's own records of the attempt."""
    return AttemptFolder(shared.parent.parent / "attempts" / shared.name)


def rename_unfinished_saves(root: Path) -> None:
    """Rename what writers before us have begun in a job's folder of checkpoints; it is deleted as any leftover. Raises
    OSError.
    """
    with suppress(FileNotFoundError), os.scandir(root) as entries:
        for entry in list(entries):
            match = UNFINISHED.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False) and not os.path.lexists(root / entry.name / NAME):
                Path(entry.path).rename(root / f".part-{match[1]}{os.urandom(4).hex()}")
