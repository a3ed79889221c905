"""Which checkpoint an attempt resumes from: the newest that proves sound while it is loaded, the same on all ranks."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from workers.checkpoint.disk.damage_marks import damage_reason, mark_damaged
from workers.checkpoint.format.manifest import NAME, DamagedCheckpoint
from workers.checkpoint.format.step_folders import newest_first
from workers.checkpoint.load_report import SkippedCheckpoint
from workers.checkpoint.loader import Loaded
from workers.tasks.distributed import RankGroup


def candidate_checkpoints(resume_from: Path, own: Path | None) -> list[Path]:
    """`resume_from` and, where it is one of the job's `own` checkpoints or a folder of some, those before it.

    Without those that were found damaged before; what a user named is tried whatever is known of it, and nothing in its
    place.
    """
    if not os.path.lexists(resume_from / NAME):
        found = newest_first(resume_from)
        return [folder for folder in found if not damage_reason(folder)] or [resume_from]
    there = newest_first(resume_from.parent) if resume_from.parent == own else []
    older = there[there.index(resume_from) + 1 :] if resume_from in there else []
    return [resume_from, *(folder for folder in older if not damage_reason(folder))]


def newest_sound(paths: list[Path], load: Callable[[Path], Loaded], ranks: RankGroup) -> Loaded:
    """What the first of `paths` holds that is sound on every rank; all ranks call this, with the same names in order.

    Each damaged one is marked on the node that found it. Raises DamagedCheckpoint when none is left: what was to be
    filled may then hold anything.
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
        told = ranks.gathered(error.message if error else "")
        fault = next(filter(None, told), "")
        if loaded is not None and not fault:
            loaded.report.skipped.extend(skipped)
            return loaded
        skipped.append(SkippedCheckpoint(str(path), fault))
        _say(ranks.rank, f"{path.name} is damaged and is not resumed from: {fault}")
    more = f"; so are {len(skipped) - 1} before it" if len(skipped) > 1 else ""
    raise DamagedCheckpoint(f"{skipped[0].reason}{more}", "copy it again from its source, or begin from another")


def _say(rank: int, sentence: str) -> None:
    """In the job's log, once."""
    if rank == 0:
        print(f"polyfleet: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 - the rank's log is its stderr
