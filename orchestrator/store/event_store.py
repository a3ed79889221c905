"""EventStore: append and be sure, ask again and get the same answer."""

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row, Select, select

from cluster.errors import FleetError
from orchestrator.core.model import Event
from orchestrator.store import job_rows
from orchestrator.store.benchmark_lines import BenchmarkLines
from orchestrator.store.codec import encode
from orchestrator.store.damaged_rows import DamagedDataError, DamagedRow, DamageList, data_of, event_of, readable
from orchestrator.store.database import Database
from orchestrator.store.idempotency import IdempotentRequest, IdempotentRequests, StoredResponse
from orchestrator.store.job_cache import JobCache
from orchestrator.store.job_table import AT_ONCE, METRICS, JobTable
from orchestrator.store.retention import Retention
from orchestrator.store.schema import LAST, counters, events, jobs, reports
from orchestrator.store.unit_of_work import LARGEST, LONGEST_JOB, Stored, UnitOfWork, make_unit, storable
from orchestrator.store.writer import StoreWriter

log = logging.getLogger(__name__)

Data = dict[str, Any]

WRITING_LATE_S = 6.0
"""Longer than SQLite waits for a lock of another program."""

GENERATION_STEP = 1_000_000
"""A counter of 63 bits lasts for millions of millions of starts."""


@dataclass(frozen=True, slots=True)
class StoreState:
    """`error` is that of the last write, "" when it went well, and `failed_s` how long ago; 0 where the next one would
    fail. Sizes are None where the database is not a file here.
    """

    where: str
    error: str
    failed_s: float
    size_bytes: int | None
    free_bytes: int | None
    damage: DamageList
    reports_lost: int


class EventStore:
    """Safe to use from many threads. Raises FleetError when the disk or the database does not do its part.

    A row that cannot be read is left out of every answer and named in `damage`. `identity` was drawn when the database
    was made.
    """

    def __init__(self, url: str):
        self._database = Database(url)
        self.damage = DamageList()
        self._ledger = JobCache()
        self.jobs = JobTable(self._database, self._ledger, self.damage)
        self._writer = StoreWriter(self._database, self._ledger, self.jobs, self.damage)
        self.retention = Retention(self._database, self._writer, self._ledger, self.jobs)
        self.identity = self._database.identity
        self.benchmarks = BenchmarkLines(self._database, self._writer, self.damage)
        self._once = IdempotentRequests(self._database, self._writer, self.damage)
        self._writer.start()

    def close(self) -> None:
        """Write what waits and let go of the database."""
        if not self._writer.close():
            log.error("a write to %s does not end: it is left to the end of this process", self._database.name)
            return
        self._database.close_readers()
        self._writer.disconnect()
        self._database.close()

    @property
    def last_seq(self) -> int:
        """Of the newest durable event, 0 when there is none."""
        return self._writer.last_seq

    def newest_s(self) -> float | None:
        """When the newest event that is kept happened, by the clock of then."""
        newest = select(events.c.time).where(events.c.seq <= self.last_seq).order_by(events.c.seq.desc()).limit(1)
        with self._database.reading() as connection:
            return connection.scalar(newest)

    def append(self, new: Sequence[Event], strict: bool = False) -> list[int]:
        """Their numbers, in order. Durable when it returns, with the rows of their jobs; when it raises, none of them
        is stored. With `strict` it raises EventIgnored where one of them does not count.
        """
        numbers: list[int] = self._writer.submit(make_unit(new, strict)) if new else []
        return numbers

    def once(self, key: str, digest: str, make: Callable[[], StoredResponse], stored: Stored = lambda _: None) -> Data:
        """As `once_each` with one request; raises its error."""
        (told,) = self.once_each([IdempotentRequest(key, digest, make)], stored)
        if isinstance(told, Exception):
            raise told
        return told

    def once_each(self, asked: Sequence[IdempotentRequest], stored: Stored = lambda _: None) -> list[Data | Exception]:
        """The body that each `make` gave the first time its key was used, however often and from wherever it is asked
        again; or the error of that request.

        The events and the answer of each become durable in one transaction; `stored` then gets the records of its jobs,
        in the writer's thread, before anybody can see them. With another digest the key is a Conflict.
        """
        return self._once.each(asked, stored)

    def read(self, after: int, limit: int | None = None) -> list[Event]:
        """Events with a number above `after`, oldest first."""
        return self._events(select(events).where(events.c.seq > after), limit)

    def read_on(self, after: int, limit: int) -> tuple[list[Event], int]:
        """As `read`, and up to which number there is no other: some may be of removed jobs or in damaged rows."""
        last = self.last_seq
        rows = self._rows(select(events).where(events.c.seq > after), limit)
        found = [event for row in rows if (event := self._event(row))]
        seen = rows[-1].seq if rows else after
        return found, seen if len(rows) == limit else max(seen, last)

    def events_of(self, job: str) -> list[Event]:
        return self._events(select(events).where(events.c.job == job), None)

    def mark_damaged(self, job: str, why: str) -> None:
        """Say, now and after a start, that the history of `job` cannot be trusted."""
        marked = jobs.update().where(jobs.c.id == job).values(damaged=why)
        self._writer.submit(UnitOfWork(action=lambda connection: connection.execute(marked)))
        self.jobs.damaged[job] = why

    def refresh(self, after: int) -> int | None:
        """Write anew, from their events, the rows of some ended jobs numbered above `after` that another version wrote.
        Up to which number it has looked, None where no job is left.
        """
        with self._database.reading() as connection:
            looked, rows = job_rows.outdated(connection, after, self.damage)
        if rows:
            self._writer.submit(UnitOfWork(action=partial(self.jobs.change, rows=rows)))
        return looked

    def differences(self) -> list[str]:
        """What the table of jobs says otherwise than the log; reads all of both."""
        with self._database.reading() as connection:
            return list(job_rows.differences(connection, self.damage))

    def state(self) -> StoreState:
        """Now: what a person has to know of the store."""
        size_bytes, free_bytes = self._database.room()
        error, failed_s = self._writer.trouble
        ago_s = time.monotonic() - failed_s if error else 0.0
        if (writing_s := self._writer.writing_s) > WRITING_LATE_S:
            error, ago_s = f"a write has not ended for {writing_s:.0f} s", 0.0
        try:
            self._database.check_place()
        except FleetError as e:
            error = error or str(e)
        return StoreState(self._database.name, error, ago_s, size_bytes, free_bytes, self.damage, self.reports_lost)

    def wait(self, after: int, timeout_s: float) -> bool:
        """Whether there is an event with a number above `after`, waiting for it up to `timeout_s`."""
        with self._writer.committed:
            return self._writer.committed.wait_for(lambda: self.last_seq > after, timeout_s)

    def events_below(self, prefix: str) -> list[Event]:
        """Of all owners whose name begins so, oldest first: a range of the index is read, not all events."""
        below = select(events.c.seq).where(events.c.job.between(prefix, prefix + LAST))
        return self._events(select(events).where(events.c.seq.in_(below)), None)

    def report(self, job: str, epoch: int, step: int, time_s: float, data: Data, at: int = 0) -> None:
        """Metrics of one step: written soon, not waited for, dropped rather than ever blocking (`reports_lost`).

        `at` is where the attempt's events file goes on after it. A step or time that is no number a database can hold
        is stored as 0: metrics come from users' code.
        """
        row = {"job": storable("job id", job, LONGEST_JOB), "epoch": epoch, "data": encode(data)}
        whole = isinstance(step, int) and abs(step) < LARGEST
        finite = isinstance(time_s, int | float) and math.isfinite(time_s)
        self._writer.submit_report(row | {"step": step if whole else 0, "time": time_s if finite else 0.0, "at": at})

    def told_at(self, job: str, epoch: int) -> int:
        """Up to where the events file of that attempt is stored, by its reports and checkpoints; 0 where nothing is.

        Within an attempt `at` only grows, and epochs do too: the newest rows tell.
        """
        report = select(reports.c.epoch, reports.c.at).where(reports.c.job == job).order_by(reports.c.seq.desc())
        noted = select(events.c.data).where(
            events.c.job == job, events.c.epoch == epoch, events.c.event == "checkpoint"
        )
        record = self.jobs.get(job)
        with self._database.reading() as connection:
            newest = connection.execute(report.limit(1)).first()
            if newest is not None and newest.epoch > epoch:
                newest = connection.execute(report.where(reports.c.epoch == epoch).limit(1)).first()
            checkpoint = None
            if record and record.checkpoint:
                checkpoint = connection.scalar(noted.order_by(events.c.seq.desc()).limit(1))
        reported = newest.at if newest is not None and newest.epoch == epoch else 0
        return max(int(reported), _at(checkpoint))

    def next_generation(self, floor: int = 0) -> int:
        """A number above `floor` and above all that were given before; durable. How far above is left to chance: two
        copies of one database give different ones.
        """
        step = 1 + secrets.randbelow(GENERATION_STEP)
        generation: int = self._writer.submit(
            UnitOfWork(action=partial(_next, name="generation", floor=floor, step=step))
        )
        return generation

    @property
    def reports_lost(self) -> int:
        """Reports dropped since the start: too many waited, or the disk was full."""
        return self._writer.reports_lost

    def reports(self, job: str, after: int = 0, limit: int | None = None) -> list[Data]:
        """What a job reported, oldest first: the metrics, and seq, epoch, step and time of each."""
        wanted = select(reports).where(reports.c.job == job, reports.c.seq > after).order_by(reports.c.seq).limit(limit)
        with self._database.reading() as connection:
            rows = connection.execute(wanted).all()
        return [told for row in rows if (told := self._report(row))]

    def last_report(self, job: str) -> Data:
        """The newest metrics of a job, {} when it reported none."""
        newest = select(reports).where(reports.c.job == job).order_by(reports.c.seq.desc()).limit(1)
        with self._database.reading() as connection:
            row = connection.execute(newest).first()
        return self._metrics(row) or {} if row else {}

    def last_reports(self, ids: Sequence[str]) -> dict[str, Data]:
        """As `last_report`, of many; those that reported none, or something that cannot be read, are left out."""
        found: dict[str, Data] = {}
        for start in range(0, len(ids), AT_ONCE):
            wanted = select(jobs.c.id, METRICS).where(jobs.c.id.in_(ids[start : start + AT_ONCE]))
            with self._database.reading() as connection:
                rows = connection.execute(wanted).all()
            for row in rows:
                try:
                    found[row.id] = data_of(row.metrics) if row.metrics is not None else {}
                except DamagedDataError:
                    continue  # named when the reports themselves are read
        return {job: data for job, data in found.items() if data}

    def _events(self, wanted: Select[Any], limit: int | None) -> list[Event]:
        return [event for row in self._rows(wanted, limit) if (event := self._event(row))]

    def _rows(self, wanted: Select[Any], limit: int | None) -> Sequence[Row[Any]]:
        """None that is not acknowledged, even where the database shows one."""
        acknowledged = wanted.where(events.c.seq <= self.last_seq)
        with self._database.reading() as connection:
            return connection.execute(acknowledged.order_by(events.c.seq).limit(limit)).all()

    def _event(self, row: Row[Any]) -> Event | None:
        try:
            return event_of(row)
        except DamagedDataError as e:
            self.damage.add(DamagedRow("events", row.seq, readable(row.job), readable(row.event), str(e)))
            return None

    def _metrics(self, row: Row[Any]) -> Data | None:
        try:
            return data_of(row.data)
        except DamagedDataError as e:
            self.damage.add(DamagedRow("reports", row.seq, readable(row.job), "report", str(e)))
            return None

    def _report(self, row: Row[Any]) -> Data | None:
        metrics = self._metrics(row)
        if metrics is None:
            return None
        return {**metrics, "seq": row.seq, "epoch": row.epoch, "step": row.step, "time": row.time}


def _at(checkpoint: str | None) -> int:
    """Of the data of an event; 0 where it cannot be read, which is told when its job's history is."""
    try:
        at = data_of(checkpoint).get("at", 0) if checkpoint is not None else 0
    except DamagedDataError:
        return 0
    return at if isinstance(at, int) else 0


def _next(connection: Connection, name: str, floor: int, step: int) -> int:
    """The next value of a counter: `step` above the last one, and above `floor`."""
    mine = counters.c.name == name
    value = connection.scalar(select(counters.c.value).where(mine))
    after = max(value or 0, floor) + step
    changed = counters.insert().values(name=name, value=after)
    connection.execute(changed if value is None else counters.update().where(mine).values(value=after))
    return after
