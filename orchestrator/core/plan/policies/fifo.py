"""Higher priority first, then the order of submission. An interrupted job keeps its position."""

from collections.abc import Iterable

from orchestrator.core.model import Job, Snapshot
from orchestrator.core.states import WAITING

UNNUMBERED = 1 << 62
"""Position of a job that was not submitted (`explain`, a dry run): after all others."""


def fifo(snapshot: Snapshot) -> list[Job]:
    waiting = (job for job in snapshot.jobs if job.state in WAITING)
    return sorted(waiting, key=lambda job: (-job.priority, job.number or UNNUMBERED, job.id))


def by_number(jobs: Iterable[Job]) -> list[Job]:
    """Sort jobs by submission, whatever their priority."""
    return sorted(jobs, key=lambda job: (job.number or UNNUMBERED, job.id))
