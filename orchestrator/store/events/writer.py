"""The only thread that writes. It commits all waiting units in one transaction, so that they share one fsync."""

import logging
import math
import secrets
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, Table, func, select

from cluster.errors import FleetError
from orchestrator.store.database.database import RECONNECT_PAUSE_S, RECONNECT_S, ConnectionLost, Database, insert_rows
from orchestrator.store.database.schema import benchmark_lines, counters, events, reports, requests
from orchestrator.store.database.schema import writer as writers
from orchestrator.store.events.unit_of_work import Row, StoreBusy, UnitOfWork, committed_result, wait_committed
from orchestrator.store.events.write_queue import WriteQueue
from orchestrator.store.rows import job_rows
from orchestrator.store.rows.damaged_rows import DamageList
from orchestrator.store.rows.job_cache import Batch, InvalidEvent, JobCache, number_events
from orchestrator.store.rows.job_table import JobTable

log = logging.getLogger(__name__)

OUTAGE_S = 1.0
WAIT_S = 15.0
"""Seconds that a unit of work waits for its turn. Longer than a database may take to refuse earlier ones (5 s SQLite,
10 s PostgreSQL).
"""
CLOSE_S = 30.0
KEYS_PER_QUERY = 500


class StoreWriter(threading.Thread):
    """Writer thread. `last_seq` is the number of the newest durable event, `last_report` that of the newest report;
    `committed` is notified of new events.

    `trouble` is the error of the last write, "" if it succeeded, and its time (monotonic). After an error, the database
    may contain rows above `last_seq` and requests with a `doubtful` key that were not acknowledged: readers ignore
    them.
    """

    def __init__(self, database: Database, ledger: JobCache, table: JobTable, damage: DamageList):
        super().__init__(name="store-writer", daemon=True)
        self._cache, self._table, self._damage = ledger, table, damage
        self.committed = threading.Condition()
        self._metrics_failed = 0
        self._database = database
        self._queue = WriteQueue()
        self._connection: Connection | None = None
        self.trouble: tuple[str, float] = ("", 0.0)
        self._lost_s = 0.0
        self._write_started_s: float | None = None
        self.doubtful: set[str] = set()
        self._doubtful_jobs: set[str] = set()
        self._token = secrets.token_hex(16)
        with database.translated_errors(), database.connect() as connection, connection.begin():
            connection.execute(writers.delete())
            connection.execute(writers.insert().values(id=1, token=self._token))
            self.last_seq = _highest(connection, events)
            self.last_report = _highest(connection, reports)
            self._last_line = _highest(connection, benchmark_lines)
            table.acknowledged = self.last_seq
            table.load(connection)

    def submit(self, work: UnitOfWork) -> Any:
        """Write a unit; block until it is durable. If it raises FleetError, nothing is stored."""
        (result,) = self.submit_all([work], math.inf)
        if isinstance(result, Exception):
            raise result
        return result

    def submit_all(self, units: Sequence[UnitOfWork], limit_s: float) -> list[Any]:
        """Submit units together; return the result or the error of each. Units still waiting after WAIT_S are
        withdrawn. A write in progress is waited for: the database's time-outs end it, unless a disk never responds.
        After `limit_s` its result is CommitPending.
        """
        started_s = time.monotonic()
        if not self._queue.add(units):
            return [FleetError("the job store is closed", "start the server again") for _ in units]
        if not wait_committed(units, started_s + WAIT_S):
            self._withdraw(units)
            wait_committed(units, started_s + limit_s)
        return [committed_result(unit) for unit in units]

    def _withdraw(self, units: Sequence[UnitOfWork]) -> None:
        """Withdraw units that still wait for their turn; nothing of them is stored."""
        late = self._queue.withdraw(units)
        message = f"the job store has not finished earlier writes after {WAIT_S:.0f} s"
        _set_errors(late, StoreBusy(message, "nothing was stored: retry, and see `polyfleet doctor`"))

    def submit_metrics(self, row: Row) -> None:
        """Queue the metrics of one step and return at once; if too many wait, the oldest are dropped."""
        self._queue.add_metrics(row)

    @property
    def metrics_lost(self) -> int:
        """Number of rows of metrics that were dropped, because too many waited, or could not be written."""
        return self._queue.metrics_dropped + self._metrics_failed

    @property
    def writing_s(self) -> float:
        """Seconds since the current write began; 0 if there is none."""
        started_s = self._write_started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    def close(self) -> bool:
        """Write everything that waits, then stop; the connection stays open until `disconnect`. Return False if that
        takes longer than CLOSE_S; the thread then ends with the process.
        """
        self._queue.close()
        self.join(CLOSE_S)
        return not self.is_alive()

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def run(self) -> None:
        while batch := self._queue.take():
            work, metrics = batch
            self._write_started_s = started_s = time.monotonic()
            try:
                self._write(work, metrics)
            except FleetError as e:
                is_outage = time.monotonic() - started_s > OUTAGE_S
                waiting = self._queue.take_units() if is_outage else []  # none of them waits for further time-outs
                self._fail([*work, *waiting], metrics, e)
            except BaseException as e:
                self._fail_all(work, metrics, e)
                raise
            finally:
                self._write_started_s = None

    def _write(self, work: list[UnitOfWork], metrics: list[Row]) -> None:
        """Commit; if the connection is lost, again on a new one for up to RECONNECT_S. During a longer outage, later
        units fail at their first try. Units with an action fail at once: if the lost commit succeeded after all, only
        events, keys and lines can be removed again.
        """
        while True:
            try:
                with self._database.translated_errors():
                    return self._commit(work, metrics)
            except ConnectionLost as e:
                now = time.monotonic()
                self._lost_s = self._lost_s or now
                if now - self._lost_s > RECONNECT_S:
                    raise
                self._mark_doubtful(work)
                _set_errors([unit for unit in work if unit.action], e)
                work = [unit for unit in work if not unit.done.done()]
                time.sleep(RECONNECT_PAUSE_S)

    def _commit(self, work: list[UnitOfWork], metrics: list[Row]) -> None:
        connection = self._connected()
        with connection.begin():
            self._check_token(connection)
            changes = self._cache.begin_batch(
                partial(self._table.load_some, connection), (e for w in work for e in w.events)
            )
            work, rows = self._number_units(work, changes)
            metrics_rows = [*metrics, *(row for w in work for row in w.metrics)]
            metrics_rows = [row | {"seq": self.last_report + n} for n, row in enumerate(metrics_rows, start=1)]
            results = [unit.action(connection) if unit.action else None for unit in work]
            requests_done = [w.request for w in work if w.request]
            benchmark_rows = [row for w in work for row in w.benchmark_lines]
            benchmark_rows = [row | {"seq": self._last_line + n} for n, row in enumerate(benchmark_rows, start=1)]
            for table, values in (
                (events, rows),
                (requests, requests_done),
                (reports, metrics_rows),
                (benchmark_lines, benchmark_rows),
            ):
                if values:
                    insert_rows(connection, table, values)
            self._table.write(connection, changes)
        self._database.check_file()
        self.last_report += len(metrics_rows)
        self._last_line += len(benchmark_rows)
        self._acknowledge(work, results, changes, len(rows))

    def _number_units(self, work: list[UnitOfWork], changes: Batch) -> tuple[list[UnitOfWork], list[Row]]:
        """Units with valid events, and the rows of their events; the other units fail."""
        valid: list[UnitOfWork] = []
        rows: list[Row] = []
        for unit in work:
            first = self.last_seq + len(rows) + 1
            try:
                changes.add(number_events(unit.events, first), unit.strict)
            except InvalidEvent as e:
                unit.done.set_exception(e)
                continue
            valid.append(unit)
            rows += [row | {"seq": seq} for seq, row in enumerate(unit.rows, first)]
        return valid, rows

    def _acknowledge(self, work: list[UnitOfWork], results: list[Any], changes: Batch, written: int) -> None:
        first = self.last_seq + 1
        self.trouble, self._lost_s = ("", 0.0), 0.0
        for unit in work:
            if unit.stored is not None:
                jobs = dict.fromkeys(event.job for event in unit.events)
                unit.stored([changes.after[job] for job in jobs if job in changes.after])  # a node's events have no job
        self._cache.put(changes.after.values())
        with self.committed:
            self.last_seq += written
            self._table.acknowledged = self.last_seq
            self.committed.notify_all()
        for unit, result in zip(work, results, strict=True):
            unit.done.set_result(result if unit.action else list(range(first, first + len(unit.rows))))
            first += len(unit.rows)

    def _fail(self, work: list[UnitOfWork], metrics: list[Row], error: FleetError) -> None:
        """Fail units. If their commit succeeded after all, `_connected` removes their rows again."""
        log.error("%s", error)
        self.trouble = (str(error), time.monotonic())
        self._metrics_failed += len(metrics)
        self._mark_doubtful(work)
        _set_errors(work, error)

    def _mark_doubtful(self, work: list[UnitOfWork]) -> None:
        """Record that units may be stored, and drop the connection, if any: the next connection first removes them."""
        if self._connection is not None:
            self.doubtful |= {unit.request["key"] for unit in work if unit.request}
            self._doubtful_jobs |= {event.job for unit in work for event in unit.events}
            self._connection.invalidate()
            self.disconnect()

    def _fail_all(self, work: list[UnitOfWork], metrics: list[Row], error: BaseException) -> None:
        """Fail all waiting units after a bug ended the thread, so that no caller waits for it."""
        self._queue.close()
        work = [*work, *self._queue.take_units()]
        self._fail(work, metrics, FleetError(f"the job store stopped: {error!r}", "start the server again"))

    def _check_token(self, connection: Connection) -> None:
        """Check the writer's token. Its row stays locked until the commit, so no other server can write in between."""
        token = connection.scalar(select(writers.c.token).with_for_update())
        if token != self._token:
            raise FleetError(f"another server has taken over {self._database.name}", "stop one of the two servers")

    def _connected(self) -> Connection:
        """The connection; after an error, a new one. A commit that reported an error may have reached the disk; rows
        that were not acknowledged are removed again, so that an error means "not stored"."""
        if self._connection is None:
            self._connection = self._database.connect()
            with self._connection.begin():
                self._check_token(self._connection)
                self._connection.execute(events.delete().where(events.c.seq > self.last_seq))
                self._connection.execute(reports.delete().where(reports.c.seq > self.last_report))
                self._connection.execute(benchmark_lines.delete().where(benchmark_lines.c.seq > self._last_line))
                keys = sorted(self.doubtful)
                for first in range(0, len(keys), KEYS_PER_QUERY):
                    batch = keys[first : first + KEYS_PER_QUERY]
                    self._connection.execute(requests.delete().where(requests.c.key.in_(batch)))
                job_rows.rebuild_some(self._connection, self._doubtful_jobs, self._damage)
            self.doubtful.clear()
            self._doubtful_jobs.clear()
        return self._connection


def _set_errors(work: list[UnitOfWork], error: FleetError) -> None:
    for unit in work:
        if not unit.done.done():
            unit.done.set_exception(type(error)(*error.args))


def _highest(connection: Connection, table: Table) -> int:
    """The highest number used so far; its row may have been removed with an old job."""
    recorded = connection.scalar(select(counters.c.value).where(counters.c.name == table.name)) or 0
    return max(recorded, connection.scalar(select(func.max(table.c.seq))) or 0)
