"""One page of the list of jobs: by state, name and time of submission, from the newest backwards."""

from dataclasses import dataclass
from typing import Any

from orchestrator.core.jobs.fold import Record
from orchestrator.runtime.jobs.jobs import Jobs


@dataclass(frozen=True, slots=True)
class JobsQuery:
    """A request for a page. `before`: cursor of the previous page. `since_s`: seconds since the epoch.

    Empty `states`, `name` and `since_s` select all jobs; empty `fields` selects all fields.
    """

    states: tuple[str, ...] = ()
    name: str = ""
    since_s: float = 0.0
    before: int | None = None
    limit: int = 100
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobsPage:
    """A page of views, newest last. `before`: cursor for the next page, None if this is the last."""

    rows: list[dict[str, Any]]
    before: int | None = None


def page(jobs: Jobs, request: JobsQuery) -> tuple[list[Record], int | None]:
    """Return (the newest matching records, newest last; the cursor of the next, older page)."""
    result = jobs.page(request.states, request.before, request.limit, request.name)
    records = [record for record in result.records if record.job.submitted_s >= request.since_s]
    return records, result.before if len(records) == len(result.records) else None
