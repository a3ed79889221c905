"""Check, before a rank commits or deletes a checkpoint, that its attempt has not been replaced.

A rank that was frozen cannot know for how long, but its lease shows it: the lease's clock runs on. And before a newer
attempt starts, unfinished saves of older ones are renamed: a rank that was frozen between this check and its commit
then finds nothing to commit.
"""

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from workers.checkpoint.format.manifest import NAME
from workers.errors import AttemptReplaced
from workers.processes.process_tree import MARK
from workers.protocol import fence, lease
from workers.protocol.folders import AttemptFolder, parse, read_json

CHECK_EVERY_S = 0.1
UNFINISHED = re.compile(r"(?:\.part-)?(step-\d{8,}-)[0-9a-f]{8}", re.ASCII)


def check_not_replaced(environ: Mapping[str, str] = os.environ) -> None:
    """Raise AttemptReplaced in a process of an attempt that may have been replaced.

    Does nothing elsewhere. Waits while the fence is raised and the lease still lasts: the server lowers a fence if a
    silent node responds.
    """
    while MARK in environ and (reason := replaced_reason(Path(environ[MARK]))):
        if lease.is_expired(_record_folder(Path(environ[MARK])).lease):
            raise AttemptReplaced(
                f"this attempt was replaced and cannot save: {reason}",
                "nothing to do: the job continues in a newer attempt",
            )
        time.sleep(CHECK_EVERY_S)


def replaced_reason(shared: Path) -> str:
    """Return why the attempt whose ranks write into `shared` may have been replaced; "" if it was not."""
    attempt, folder = parse(shared.name), _record_folder(shared)
    past_s = lease.now_s() - lease.deadline_s(folder.lease)
    if attempt is None or past_s >= 0:
        return f"its lease ended {past_s:.1f} s ago" if lease.deadline_s(folder.lease) else "it has no lease"
    launch: Any = read_json(folder.launch)
    if isinstance(launch, dict) and launch.get("fences"):
        with suppress(fence.FenceUnreadable):
            epoch = fence.read_folder(Path(launch["fences"]), attempt.job)
            return f"attempt {epoch} of its job has superseded it" if epoch > attempt.epoch else ""
    return ""


def _record_folder(shared: Path) -> AttemptFolder:
    """The node's record folder of the attempt whose ranks write into `shared`."""
    return AttemptFolder(shared.parent.parent / "attempts" / shared.name)


def rename_unfinished_saves(root: Path) -> None:
    """Rename unfinished saves of earlier attempts in a job's checkpoint folder. Raises OSError.

    They are deleted later, as any leftover.
    """
    with suppress(FileNotFoundError), os.scandir(root) as entries:
        for entry in list(entries):
            match = UNFINISHED.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False) and not os.path.lexists(root / entry.name / NAME):
                Path(entry.path).rename(root / f".part-{match[1]}{os.urandom(4).hex()}")
