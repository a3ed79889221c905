"""One page of the list of jobs: by state, name and time of submission, from the newest backwards."""

from dataclasses import dataclass
from typing import Any

from orchestrator.core.fold import Record
from orchestrator.runtime.jobs import Jobs


@dataclass(frozen=True, slots=True)
class JobsWanted:
    """`before` is the cursor of the page asked for last. `since_s` is in seconds since the epoch.

    No states, "" and 0 mean all; no fields mean all.
    """

    states: tuple[str, ...] = ()
    name: str = ""
    since_s: float = 0.0
    before: int | None = None
    limit: int = 100
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobsPage:
    """`rows` are views, the newest last; `before` is what to ask for next, None where there is no more."""

    rows: list[dict[str, Any]]
    before: int | None = None


def page(jobs: Jobs, wanted: JobsWanted) -> tuple[list[Record], int | None]:
    """The newest of them, the newest last, and the cursor of the page before."""
    found = jobs.page(wanted.states, wanted.before, wanted.limit, wanted.name)
    records = [record for record in found.records if record.job.submitted_s >= wanted.since_s]
    return records, found.before if len(records) == len(found.records) else None
