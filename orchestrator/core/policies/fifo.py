"""Higher priority first; among equals, first come, first served. A job that was interrupted keeps its place."""

from collections.abc import Iterable

from orchestrator.core.model import Job, Snapshot
from orchestrator.core.states import WAITING

UNNUMBERED = 1 << 62
"""A job that is only asked about (`explain`, a dry run) comes after all that were submitted."""


def fifo(snapshot: Snapshot) -> list[Job]:
    waiting = (job for job in snapshot.jobs if job.state in WAITING)
    return sorted(waiting, key=lambda job: (-job.priority, job.number or UNNUMBERED, job.id))


def by_number(jobs: Iterable[Job]) -> list[Job]:
    """First come, first served, whatever their priority."""
    return sorted(jobs, key=lambda job: (job.number or UNNUMBERED, job.id))
