"""One page of the list of jobs: by state, name and time of submission, from the newest backwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from orchestrator.core.fold import Record
from orchestrator.runtime.jobs import Jobs


@dataclass(frozen=True, slots=True)
class JobsWanted:
    """`before` is a job's id: only those submitted before it. `since_s` is in seconds since the epoch.

    No states, "" and 0 mean all; no fields mean all.
    """

    states: tuple[str, ...] = ()
    name: str = ""
    since_s: float = 0.0
    before: str = ""
    limit: int = 100
    fields: tuple[str, ...] = ()

    def takes(self, record: Record) -> bool:
        job = record.job
        return (
            (not self.states or str(job.state) in self.states)
            and self.name in ("", job.name)
            and job.submitted_s >= self.since_s
        )


def page(jobs: Jobs, wanted: JobsWanted) -> list[Record]:
    """The newest of them, the newest last. Raises NotFound for a `before` that is no job."""
    newest_first = reversed(jobs.all())
    if wanted.before:
        newest_first = _older(newest_first, jobs.find(wanted.before).job.id)
    found = list(islice((r for r in newest_first if wanted.takes(r)), wanted.limit))
    return found[::-1]


def _older(newest_first: Iterator[Record], job_id: str) -> Iterator[Record]:
    for record in newest_first:
        if record.job.id == job_id:
            break
    return newest_first
