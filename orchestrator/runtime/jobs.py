"""The jobs of this server: open ones in memory, the others in the store. An event counts once it is stored."""

import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from cluster.errors import FleetError, NotFound, nearest
from orchestrator.core.fold import Record
from orchestrator.core.model import Event
from orchestrator.store.event_store import EventStore
from orchestrator.store.job_table import MANY, JobPage
from orchestrator.store.sqlite import ReplacedError

NEAREST_OF = 50
METRICS_KEPT = 10_000
CHECKED_AT_ONCE = 100
FINISHED_KEPT = 50
"""Newest jobs that finished since somebody looked: with more of them each says less."""
GONE = "jobs that ended long ago are removed; set POLYFLEET_KEEP_JOBS to keep them longer"


class NotStored(FleetError):
    """The job store cannot take anything now: a full disk, a database that is gone. Later it may, unless its
    `retry_after_s` is None.
    """

    retry_after_s: int | None = 5

    @classmethod
    def of(cls, error: FleetError) -> "NotStored":
        made = cls(error.message, error.remedy)
        if isinstance(error, ReplacedError):  # asking again helps nobody
            made.retry_after_s = None
        return made


class Jobs:
    """Safe to use from several threads."""

    def __init__(self, store: EventStore):
        self._store, self._table = store, store.jobs
        self._lock = threading.Lock()
        self._metrics: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._finished: deque[str] = deque(maxlen=FINISHED_KEPT)

    @property
    def damaged(self) -> dict[str, str]:
        """Open jobs whose history cannot be trusted, and why: none of them may go on."""
        return self._table.damaged

    def new_id(self, name: str) -> str:
        """Unique with high probability; the store refuses one that is taken."""
        return f"{name}-{secrets.token_hex(4)}"

    # -- writing

    def commit(self, events: Sequence[Event]) -> list[Event]:
        """All of them in one transaction, in order, with the rows of their jobs; they come back with their numbers.

        Raises NotStored, with nothing changed, when the store cannot take them now; EventIgnored when the job's history
        has no place for one of them; UserError for data that it never takes.
        """
        try:
            numbers = self._store.append(events, strict=True)
        except FleetError as e:
            raise NotStored.of(e) from e
        self._finished.extend(event.job for event in events if event.event == "finished")
        return [replace(event, seq=seq) for event, seq in zip(events, numbers, strict=True)]

    def finished(self) -> list[Record]:
        """Those that were committed since the last call, the newest ones at least; oldest first. They are in memory."""
        ids = [self._finished.popleft() for _ in range(len(self._finished))]
        return [record for job in ids if (record := self.get(job))]

    # -- what may not be trusted, and what is too old

    def check_histories(self, pause: Callable[[], bool] = lambda: False) -> int:
        """Read the events of all jobs that are open now; those with a row that cannot be used are in `damaged`
        afterwards. How many were read. `pause` is called between a few and the next, and ends it by True.
        """
        ids = [record.job.id for record in self.open()]
        for start in range(0, len(ids), CHECKED_AT_ONCE):
            for job, why in self._table.distrusted(ids[start : start + CHECKED_AT_ONCE]).items():
                if job not in self.damaged:
                    self._store.mark_damaged(job, why)
            if pause():
                break
        return len(ids)

    # -- reading

    def open(self) -> list[Record]:
        """Those that have not ended or whose attempt still holds devices, in the order of submission."""
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
        """By id, the newest job of that name, or by a unique prefix of an id. Raises NotFound with the nearest."""
        if found := self.get(ref) or self._newest_of(ref):
            return found
        ids = self._table.ids_from(ref)
        if len(ids) == 1 and (found := self.get(ids[0])):
            return found
        if ids:
            count = f"{MANY} jobs or more" if len(ids) == MANY else f"{len(ids)} jobs"
            raise NotFound(f"{ref!r} could be any of {count}", f"give more of the id: {', '.join(ids[:5])}")
        if self._table.is_being_removed(ref):
            raise NotFound(f"job {ref!r} was removed", GONE)
        raise NotFound(f"no job {ref!r}", nearest(ref, self._table.newest_ids(NEAREST_OF)[::-1]))

    def id_of(self, name: str) -> str:
        """The newest job that is called so, "" where none is."""
        found = self._newest_of(name)
        return found.job.id if found else ""

    def _newest_of(self, name: str) -> Record | None:
        found = self._table.page((), name, None, 1).records if name.isprintable() and name else []
        return found[0] if found else None

    def page(self, states: Iterable[str], before: int | None = None, limit: int = 100, name: str = "") -> JobPage:
        """The newest `limit` jobs of those states (none: all) and that name ("": any; with `*` or `?` a pattern),
        newest last. `before` is the cursor of the page that was asked for last.
        """
        page = self._table.page(states, name, before, limit)
        with self._lock:
            for job, metrics in page.metrics.items():
                if job not in self._metrics:
                    self._remember(job, metrics)
        return page

    def counts(self) -> dict[str, int]:
        """How many jobs are in which state."""
        return self._table.counts()

    def measured(self, job_id: str, metrics: dict[str, Any]) -> None:
        """Remember the newest report of a job."""
        with self._lock:
            self._remember(job_id, metrics)

    def metrics(self, job_id: str) -> dict[str, Any]:
        """The newest that the job reported, {} when it reported none."""
        with self._lock:
            known = self._metrics.get(job_id)
        if known is None:
            known = self._store.last_report(job_id)
            self.measured(job_id, known)
        return known

    def _remember(self, job: str, metrics: dict[str, Any]) -> None:
        self._metrics[job] = metrics
        self._metrics.move_to_end(job)
        while len(self._metrics) > METRICS_KEPT:
            self._metrics.popitem(last=False)
