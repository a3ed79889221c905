"""Choose the checkpoint that an attempt resumes from: the newest that loads undamaged, the same on all ranks."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from workers.checkpoint.conversion.load_report import SkippedCheckpoint
from workers.checkpoint.disk.damage_marks import damage_reason, mark_damaged
from workers.checkpoint.format.manifest import NAME, DamagedCheckpoint
from workers.checkpoint.format.step_folders import newest_first
from workers.checkpoint.loading.loader import Loaded
from workers.tasks.distributed import RankGroup


def candidate_checkpoints(resume_from: Path, own_folder: Path | None) -> list[Path]:
    """List `resume_from` and, if it is in the job's `own_folder` or a folder of checkpoints, the older checkpoints.

    Leaves out checkpoints marked as damaged. A checkpoint that the user named is always tried, even if marked, and has
    no substitutes.
    """
    if not os.path.lexists(resume_from / NAME):
        checkpoints = newest_first(resume_from)
        return [folder for folder in checkpoints if not damage_reason(folder)] or [resume_from]
    siblings = newest_first(resume_from.parent) if resume_from.parent == own_folder else []
    older = siblings[siblings.index(resume_from) + 1 :] if resume_from in siblings else []
    return [resume_from, *(folder for folder in older if not damage_reason(folder))]


def load_newest_undamaged(paths: list[Path], load: Callable[[Path], Loaded], ranks: RankGroup) -> Loaded:
    """Load the first of `paths` that is undamaged on every rank. All ranks call this with the same names in order.

    A node marks the checkpoints that it finds damaged. Raises DamagedCheckpoint if all are: the objects to be filled
    may then be partly overwritten.
    """
    skipped: list[SkippedCheckpoint] = []
    for path in paths:
        loaded, error = None, None
        try:
            loaded = load(path)
        except DamagedCheckpoint as e:
            error = e
            with suppress(OSError):
                mark_damaged(path, e.message)
        damage_by_rank = ranks.gather(error.message if error else "")
        fault = next(filter(None, damage_by_rank), "")
        if loaded is not None and not fault:
            loaded.report.skipped.extend(skipped)
            return loaded
        skipped.append(SkippedCheckpoint(str(path), fault))
        _log(ranks.rank, f"checkpoint {path.name} is damaged, so the job does not resume from it: {fault}")
    more = f"; {len(skipped) - 1} older are damaged too" if len(skipped) > 1 else ""
    raise DamagedCheckpoint(f"{skipped[0].reason}{more}", "copy it again from its source, or resume from another")


def _log(rank: int, sentence: str) -> None:
    """Write a line to the job's log, once for all ranks."""
    if rank == 0:
        print(f"polyfleet: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 - the rank's log is its stderr
