"""EventStore: durable log of events, with idempotent requests, reports and the table of jobs."""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row, Select, select

from cluster.errors import FleetError
from orchestrator.core.model import Event
from orchestrator.store.database.database import Database
from orchestrator.store.database.schema import LAST_CHARACTER, counters, events, jobs, reports
from orchestrator.store.events.benchmark_lines import BenchmarkLines
from orchestrator.store.events.idempotency import IdempotentRequest, IdempotentRequests, StoredResponse
from orchestrator.store.events.retention import Retention
from orchestrator.store.events.stored_metrics import StoredMetrics
from orchestrator.store.events.unit_of_work import Stored, UnitOfWork, make_unit
from orchestrator.store.events.writer import StoreWriter
from orchestrator.store.rows import job_rows
from orchestrator.store.rows.damaged_rows import (
    DamagedDataError,
    DamagedRow,
    DamageList,
    data_of,
    event_of,
    text_or_unknown,
)
from orchestrator.store.rows.job_cache import JobCache
from orchestrator.store.rows.job_table import JobTable

log = logging.getLogger(__name__)

Data = dict[str, Any]

WRITING_LATE_S = 6.0
"""Seconds after which a write counts as late; longer than SQLite waits for a lock of another program."""

GENERATION_STEP = 1_000_000
"""Maximum increase per start: a counter of 63 bits lasts for 10^12 starts."""


@dataclass(frozen=True, slots=True)
class StoreState:
    """State of the store. `error` is that of the last write, "" if it succeeded; `failed_s` is its age, 0 if the next
    write would fail, too. Sizes are None if the database is not a local file.
    """

    where: str
    error: str
    failed_s: float
    size_bytes: int | None
    free_bytes: int | None
    damage: DamageList
    reports_lost: int


class EventStore:
    """The job store. Thread-safe. Raises FleetError if the disk or the database fails.

    A row that cannot be read is left out of every result and listed in `damage`. `identity` is a random name, generated
    when the database was created.
    """

    def __init__(self, url: str):
        self._database = Database(url)
        self.damage = DamageList()
        self._cache = JobCache()
        self.jobs = JobTable(self._database, self._cache, self.damage)
        self._writer = StoreWriter(self._database, self._cache, self.jobs, self.damage)
        self.retention = Retention(self._database, self._writer, self._cache, self.jobs)
        self.identity = self._database.identity
        self.metrics = StoredMetrics(self._database, self._writer, self.damage)
        self.benchmarks = BenchmarkLines(self._database, self._writer, self.damage)
        self._idempotent_requests = IdempotentRequests(self._database, self._writer, self.damage)
        self._writer.start()

    def close(self) -> None:
        """Write everything that waits and close the database."""
        if not self._writer.close():
            log.error("a write to %s does not end; this process exits without waiting for it", self._database.name)
            return
        self._database.close_readers()
        self._writer.disconnect()
        self._database.close()

    @property
    def last_seq(self) -> int:
        """Number of the newest durable event, 0 if there is none."""
        return self._writer.last_seq

    def newest_s(self) -> float | None:
        """Time of the newest stored event, by the clock at that time."""
        newest = select(events.c.time).where(events.c.seq <= self.last_seq).order_by(events.c.seq.desc()).limit(1)
        with self._database.reading() as connection:
            return connection.scalar(newest)

    def append(
        self,
        new: Sequence[Event],
        strict: bool = False,
        metrics: Iterable[Data] = (),
        stored: Stored | None = None,
    ) -> list[int]:
        """Append events and return their numbers, in order. They, the rows of their jobs, and the metrics are durable
        when it returns; if it raises, none is stored. With `strict`, raises InvalidEvent if an event is not valid for
        its job. `stored` is called as for `idempotent_each`.
        """
        unit = make_unit(new, strict)
        unit.metrics, unit.stored = list(metrics), stored
        numbers: list[int] = self._writer.submit(unit) if new or unit.metrics else []
        return numbers

    def idempotent(
        self, key: str, digest: str, make: Callable[[], StoredResponse], stored: Stored = lambda _: None
    ) -> Data:
        """Process one request like `idempotent_each`; raises its error."""
        (result,) = self.idempotent_each([IdempotentRequest(key, digest, make)], stored)
        if isinstance(result, Exception):
            raise result
        return result

    def idempotent_each(
        self, requests: Sequence[IdempotentRequest], stored: Stored = lambda _: None
    ) -> list[Data | Exception]:
        """For each request, return the body that `make` returned when its key was first used, however often it is
        repeated; or the request's error.

        Events and response of a request become durable in one transaction. Then `stored` is called with the records of
        its jobs, in the writer's thread, before any reader can see them. A key with another digest gives Conflict.
        """
        return self._idempotent_requests.process(requests, stored)

    def read(self, after: int, limit: int | None = None) -> list[Event]:
        """Events with a number above `after`, oldest first."""
        return self._events(select(events).where(events.c.seq > after), limit)

    def read_with_end(self, after: int, limit: int) -> tuple[list[Event], int]:
        """Like `read`, and the number up to which all events were read; some numbers may be of removed jobs or damaged
        rows.
        """
        last = self.last_seq
        rows = self._rows(select(events).where(events.c.seq > after), limit)
        parsed_events = [event for row in rows if (event := self._event(row))]
        newest = rows[-1].seq if rows else after
        return parsed_events, newest if len(rows) == limit else max(newest, last)

    def events_of(self, job: str) -> list[Event]:
        return self._events(select(events).where(events.c.job == job), None)

    def mark_damaged(self, job: str, reason: str) -> None:
        """Mark the history of `job` as damaged, durably."""
        statement = jobs.update().where(jobs.c.id == job).values(damaged=reason)
        self._writer.submit(UnitOfWork(action=lambda connection: connection.execute(statement)))
        self.jobs.damaged[job] = reason

    def refresh(self, after: int) -> int | None:
        """Rebuild, from their events, rows of some ended jobs numbered above `after` that another version wrote. Return
        the last number that was checked, None if no job is left.
        """
        with self._database.reading() as connection:
            last_checked, rows = job_rows.outdated(connection, after, self.damage)
        if rows:
            self._writer.submit(UnitOfWork(action=partial(self.jobs.change, rows=rows)))
        return last_checked

    def differences(self) -> list[str]:
        """Differences between the table of jobs and the log of events; reads all of both."""
        with self._database.reading() as connection:
            return list(job_rows.differences(connection, self.damage))

    def state(self) -> StoreState:
        """Current state of the store for `doctor` and `status`."""
        size_bytes, free_bytes = self._database.disk_space()
        error, failed_s = self._writer.trouble
        ago_s = time.monotonic() - failed_s if error else 0.0
        if (writing_s := self._writer.writing_s) > WRITING_LATE_S:
            error, ago_s = f"a write has not ended for {writing_s:.0f} s", 0.0
        try:
            self._database.check_file()
        except FleetError as e:
            error = error or str(e)
        return StoreState(self._database.name, error, ago_s, size_bytes, free_bytes, self.damage, self.metrics.lost)

    def wait(self, after: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for an event with a number above `after`; return whether there is one."""
        with self._writer.committed:
            return self._writer.committed.wait_for(lambda: self.last_seq > after, timeout_s)

    def events_below(self, prefix: str) -> list[Event]:
        """Events of all owners whose name has that prefix, oldest first. Reads a range of the index, not all events."""
        below = select(events.c.seq).where(events.c.job.between(prefix, prefix + LAST_CHARACTER))
        return self._events(select(events).where(events.c.seq.in_(below)), None)

    def stored_offset(self, job: str, epoch: int) -> int:
        """Offset up to which the attempt's events file is stored, according to its reports and checkpoints; 0 if none.

        `at` only grows within an attempt, and so do epochs, so the newest rows are sufficient.
        """
        report = select(reports.c.epoch, reports.c.at).where(reports.c.job == job).order_by(reports.c.seq.desc())
        checkpoint_data = select(events.c.data).where(
            events.c.job == job, events.c.epoch == epoch, events.c.event == "checkpoint"
        )
        record = self.jobs.get(job)
        with self._database.reading() as connection:
            newest = connection.execute(report.limit(1)).first()
            if newest is not None and newest.epoch > epoch:
                newest = connection.execute(report.where(reports.c.epoch == epoch).limit(1)).first()
            checkpoint = None
            if record and record.checkpoint:
                checkpoint = connection.scalar(checkpoint_data.order_by(events.c.seq.desc()).limit(1))
        report_offset = newest.at if newest is not None and newest.epoch == epoch else 0
        return max(int(report_offset), _checkpoint_offset(checkpoint))

    def next_generation(self, floor: int = 0) -> int:
        """A durable number above `floor` and above all earlier ones. The increase is random, so that two copies of one
        database return different numbers.
        """
        step = 1 + secrets.randbelow(GENERATION_STEP)
        generation: int = self._writer.submit(
            UnitOfWork(action=partial(_increase_counter, name="generation", floor=floor, step=step))
        )
        return generation

    def _events(self, query: Select[Any], limit: int | None) -> list[Event]:
        return [event for row in self._rows(query, limit) if (event := self._event(row))]

    def _rows(self, query: Select[Any], limit: int | None) -> Sequence[Row[Any]]:
        """Rows of acknowledged events only; the database may contain others."""
        acknowledged = query.where(events.c.seq <= self.last_seq)
        with self._database.reading() as connection:
            return connection.execute(acknowledged.order_by(events.c.seq).limit(limit)).all()

    def _event(self, row: Row[Any]) -> Event | None:
        try:
            return event_of(row)
        except DamagedDataError as e:
            self.damage.add(DamagedRow("events", row.seq, text_or_unknown(row.job), text_or_unknown(row.event), str(e)))
            return None


def _checkpoint_offset(checkpoint: str | None) -> int:
    """Offset in a checkpoint event's data; 0 if unreadable, which reading the job's history records as damage."""
    try:
        at = data_of(checkpoint).get("at", 0) if checkpoint is not None else 0
    except DamagedDataError:
        return 0
    return at if isinstance(at, int) else 0


def _increase_counter(connection: Connection, name: str, floor: int, step: int) -> int:
    """The next value of a counter: `step` above the last one, and above `floor`."""
    condition = counters.c.name == name
    value = connection.scalar(select(counters.c.value).where(condition))
    after = max(value or 0, floor) + step
    changed = counters.insert().values(name=name, value=after)
    connection.execute(changed if value is None else counters.update().where(condition).values(value=after))
    return after
