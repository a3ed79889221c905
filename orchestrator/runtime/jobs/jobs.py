"""The jobs of this server: open jobs in memory, all others in the store.

An event takes effect once it is stored.
"""

import logging
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.errors import FleetError, NotFound, UserError, nearest
from orchestrator.core.controller.commands import StoreReport
from orchestrator.core.jobs.fold import Record
from orchestrator.core.model import Event
from orchestrator.store.database.sqlite import ReplacedError
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.unit_of_work import Row, make_metrics_row
from orchestrator.store.rows.job_table import MAX_PREFIX_MATCHES, JobPage

log = logging.getLogger(__name__)

NEAREST_OF = 50
MAX_METRICS = 10_000
CHECK_BATCH = 100
MAX_FINISHED = 50
"""Maximum number of newest finished jobs cached for `finished`; further ones would add little to the history."""
REMOVED_REMEDY = "jobs that ended long ago are removed; set POLYFLEET_KEEP_JOBS to keep them longer"


class StoreUnavailable(FleetError):
    """The job store cannot be written now, for example because its disk is full.

    Retry after `retry_after_s`, unless that is None.
    """

    retry_after_s: int | None = 5

    @classmethod
    def from_error(cls, error: FleetError) -> "StoreUnavailable":
        stored_error = cls(error.message, error.remedy)
        if isinstance(error, ReplacedError):  # a retry cannot succeed
            stored_error.retry_after_s = None
        return stored_error


@dataclass(frozen=True, slots=True)
class JobsQuery:
    """A request for a page. `before`: cursor of the previous page. `since_s`: seconds since the epoch.

    Empty `states`, `name` and `since_s` select all jobs.
    """

    states: tuple[str, ...] = ()
    name: str = ""
    since_s: float = 0.0
    before: int | None = None
    limit: int = 100


class Jobs:
    """All jobs, by id. Thread-safe."""

    def __init__(self, store: EventStore):
        self._store, self._table = store, store.jobs
        self._lock = threading.Lock()
        self._metrics: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._finished: deque[str] = deque(maxlen=MAX_FINISHED)

    @property
    def damaged(self) -> dict[str, str]:
        """Open jobs with a damaged history, and the reason. None of them may continue."""
        return self._table.damaged

    def new_id(self, name: str) -> str:
        """Make a job id. It is unique with high probability; the store refuses a duplicate."""
        return f"{name}-{secrets.token_hex(4)}"

    # -- writing

    def commit(
        self,
        events: Sequence[Event],
        metrics: Sequence[StoreReport] = (),
        stored: Callable[[], None] = lambda: None,
    ) -> list[Event]:
        """Store events, the rows of their jobs, and metrics, in one transaction; return the events with their numbers.

        `stored` is called in the store's thread once all are durable, before any reader can see them.

        Raises StoreUnavailable, with nothing changed, if the store cannot be written now; InvalidEvent if an event is
        not allowed after the job's history; UserError for data that the store never accepts.
        """
        storable = _storable(metrics)
        try:
            rows = [row for _, row in storable]
            numbers = self._store.append(events, strict=True, metrics=rows, stored=lambda _: stored())
        except FleetError as e:
            raise StoreUnavailable.from_error(e) from e
        for command, _ in storable:
            self.set_metrics(command.job, command.metrics)
        self._finished.extend(event.job for event in events if event.event == "finished")
        return [replace(event, seq=seq) for event, seq in zip(events, numbers, strict=True)]

    def queue_metrics(self, metrics: Sequence[StoreReport]) -> None:
        """Store metrics soon, and do not wait. They are dropped if too many wait, or the store cannot be written."""
        for command, row in _storable(metrics):
            self._store.metrics.queue(row)
            self.set_metrics(command.job, command.metrics)

    def finished(self) -> list[Record]:
        """Jobs that finished since the last call, oldest first, at most MAX_FINISHED."""
        ids = [self._finished.popleft() for _ in range(len(self._finished))]
        return [record for job in ids if (record := self.get(job))]

    # -- damaged histories

    def check_histories(self, pause: Callable[[], bool] = lambda: False) -> int:
        """Read the events of all open jobs, and add those with an invalid row to `damaged`.

        Returns the number of open jobs. `pause` is called between batches; if it returns True, the check stops.
        """
        ids = [record.job.id for record in self.open()]
        for start in range(0, len(ids), CHECK_BATCH):
            for job, reason in self._table.damaged_histories(ids[start : start + CHECK_BATCH]).items():
                if job not in self.damaged:
                    self._store.mark_damaged(job, reason)
            if pause():
                break
        return len(ids)

    # -- reading

    def open(self) -> list[Record]:
        """Jobs that have not ended, or whose attempt still holds devices, in the order of submission."""
        return self._table.open()

    def __getitem__(self, job_id: str) -> Record:
        record = self.get(job_id)
        if record is None:
            raise KeyError(job_id)
        return record

    def __contains__(self, job_id: str) -> bool:
        return self.get(job_id) is not None

    def get(self, job_id: str) -> Record | None:
        return self._table.get(job_id)

    def find(self, ref: str) -> Record:
        """Find a job by id, by name (the newest), or by a unique id prefix. Raises NotFound, with similar ids."""
        if record := self.get(ref) or self._newest_named(ref):
            return record
        ids = self._table.ids_with_prefix(ref)
        if len(ids) == 1 and (record := self.get(ids[0])):
            return record
        if ids:
            count = f"{MAX_PREFIX_MATCHES} jobs or more" if len(ids) == MAX_PREFIX_MATCHES else f"{len(ids)} jobs"
            raise NotFound(f"{ref!r} could be any of {count}", f"give more of the id: {', '.join(ids[:5])}")
        if self._table.is_being_removed(ref):
            raise NotFound(f"job {ref!r} was removed", REMOVED_REMEDY)
        raise NotFound(f"no job {ref!r}", nearest(ref, self._table.newest_ids(NEAREST_OF)[::-1]))

    def id_of(self, name: str) -> str:
        """Id of the newest job with that name, or ""."""
        record = self._newest_named(name)
        return record.job.id if record else ""

    def _newest_named(self, name: str) -> Record | None:
        records = self._table.page((), name, None, 1).records if name.isprintable() and name else []
        return records[0] if records else None

    def page(self, states: Iterable[str], before: int | None = None, limit: int = 100, name: str = "") -> JobPage:
        """The newest `limit` jobs with those states and that name, newest last.

        `states`: empty for all. `name`: "" for any; `*` and `?` are wildcards. `before`: cursor of the previous page.
        """
        page = self._table.page(states, name, before, limit)
        with self._lock:
            for job, metrics in page.metrics.items():
                if job not in self._metrics:
                    self._cache_metrics(job, metrics)
        return page

    def select(self, query: JobsQuery) -> tuple[list[Record], int | None]:
        """Return (the newest matching records, newest last; the cursor of the next, older page)."""
        result = self.page(query.states, query.before, query.limit, query.name)
        records = [record for record in result.records if record.job.submitted_s >= query.since_s]
        return records, result.before if len(records) == len(result.records) else None

    def counts(self) -> dict[str, int]:
        """Number of jobs in each state."""
        return self._table.counts()

    def set_metrics(self, job_id: str, metrics: dict[str, Any]) -> None:
        """Cache the newest metrics of a job."""
        with self._lock:
            self._cache_metrics(job_id, metrics)

    def metrics(self, job_id: str) -> dict[str, Any]:
        """The newest metrics that the job reported, {} if it has reported none."""
        with self._lock:
            metrics = self._metrics.get(job_id)
        if metrics is None:
            metrics = self._store.metrics.last(job_id)
            self.set_metrics(job_id, metrics)
        return metrics

    def _cache_metrics(self, job: str, metrics: dict[str, Any]) -> None:
        self._metrics[job] = metrics
        self._metrics.move_to_end(job)
        while len(self._metrics) > MAX_METRICS:
            self._metrics.popitem(last=False)


def _storable(metrics: Iterable[StoreReport]) -> list[tuple[StoreReport, Row]]:
    """Return metrics with their rows. What cannot be stored is left out, so that the events with it are stored."""
    rows = []
    for command in metrics:
        step = command.metrics.get("step", 0)
        try:
            row = make_metrics_row(command.job, command.epoch, step, command.time_s, command.metrics, command.at)
        except UserError as e:
            log.warning("metrics of %s are dropped: %s", command.job, e)
        else:
            rows.append((command, row))
    return rows
