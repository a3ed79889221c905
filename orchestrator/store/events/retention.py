"""Remove old jobs: first from the table of jobs, then their other data, in small steps.

One small transaction removes a job for users, and records what remains to be removed: its events and reports in the
database, its attempts' folders on nodes. After a crash in between, the next server continues there.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Table, and_, or_, select, tuple_

from orchestrator.core.jobs.fold import Record
from orchestrator.store.database.schema import counters, events, jobs, removals, reports, requests
from orchestrator.store.events.unit_of_work import UnitOfWork
from orchestrator.store.rows.job_cache import JobCache

if TYPE_CHECKING:
    from orchestrator.store.database.database import Database
    from orchestrator.store.events.writer import StoreWriter
    from orchestrator.store.rows.job_table import JobTable

JOBS_AT_ONCE = 50
ROWS_AT_ONCE = 500
"""Maximum per transaction, so that a submission waits for it only a few milliseconds."""


@dataclass(frozen=True, slots=True)
class AttemptFolderRef:
    """Folder of an attempt of a removed job."""

    node: str
    job: str
    epoch: int


class Retention:
    """Removes old data. Each call is one transaction of the store's writer and may raise FleetError."""

    def __init__(self, database: "Database", writer: "StoreWriter", ledger: JobCache, table: "JobTable"):
        self._database, self._writer, self._cache, self._table = database, writer, ledger, table

    def remove_jobs(self, ended_before_s: float, up_to: int) -> int:
        """Remove some jobs that ended before `ended_before_s` and whose last event has at most number `up_to`. Return
        how many.
        """
        old = select(jobs.c.id).where(~jobs.c.open, jobs.c.ended < ended_before_s, jobs.c.seq <= up_to)
        with self._database.reading() as connection:
            ids = list(connection.scalars(old.order_by(jobs.c.ended).limit(JOBS_AT_ONCE)))
        if ids:
            self._submit(lambda connection: self._remove(connection, ids))
            self._cache.remove(ids)
        return len(ids)

    def remove_rows(self) -> bool:
        """Remove some reports and events of removed jobs. Return whether more are left."""
        with self._database.reading() as connection:
            if connection.scalar(select(removals.c.job).where(removals.c.node == "").limit(1)) is None:
                return False
        return bool(self._submit(self._remove_rows))

    def remove_keys(self, used_before_s: float) -> bool:
        """Remove some old idempotency keys. Return whether more are left."""
        old = select(requests.c.key).where(requests.c.time < used_before_s)
        with self._database.reading() as connection:
            keys = list(connection.scalars(old.order_by(requests.c.time).limit(ROWS_AT_ONCE)))
        if keys:
            self._submit(lambda connection: connection.execute(requests.delete().where(requests.c.key.in_(keys))))
        return len(keys) == ROWS_AT_ONCE

    def nodes(self) -> list[str]:
        """Nodes with folders that remain to be removed."""
        query = select(removals.c.node).distinct().where(removals.c.node != "").order_by(removals.c.node)
        with self._database.reading() as connection:
            return list(connection.scalars(query))

    def folders(self, node: str, after: AttemptFolderRef | None = None) -> list[AttemptFolderRef]:
        """Some folders that remain to be removed on a node, in the order of job and epoch, after `after`."""
        query = select(removals).where(removals.c.node == node).order_by(removals.c.job, removals.c.epoch)
        if after is not None:
            query = query.where(tuple_(removals.c.job, removals.c.epoch) > (after.job, after.epoch))
        with self._database.reading() as connection:
            return [
                AttemptFolderRef(row.node, row.job, row.epoch) for row in connection.execute(query.limit(ROWS_AT_ONCE))
            ]

    def folders_removed(self, folders: list[AttemptFolderRef]) -> None:
        """Record that these folders have been removed."""
        each = [and_(removals.c.job == p.job, removals.c.node == p.node, removals.c.epoch == p.epoch) for p in folders]
        if each:
            self._submit(lambda connection: connection.execute(removals.delete().where(or_(*each))))

    def give_up(self, node: str, before_s: float) -> None:
        """Give up folders, on a node that is away, of jobs that were removed before `before_s`."""
        old = and_(removals.c.node == node, removals.c.time < before_s)
        self._submit(lambda connection: connection.execute(removals.delete().where(old)))

    def _submit(self, action: Any) -> Any:
        return self._writer.submit(UnitOfWork(action=action))

    def _remove(self, connection: Connection, ids: list[str]) -> None:
        now_s = time.time()
        remaining = [{"job": job, "node": "", "epoch": 0, "time": now_s} for job in ids]
        for record in self._table.load_some(connection, ids):
            remaining += [
                {"job": p.job, "node": p.node, "epoch": p.epoch, "time": now_s} for p in attempt_folders(record)
            ]
        connection.execute(removals.insert(), remaining)
        connection.execute(jobs.delete().where(jobs.c.id.in_(ids)))

    def _remove_rows(self, connection: Connection) -> bool:
        _record_highest(connection, events, self._writer.last_seq)
        _record_highest(connection, reports, self._writer.last_report)
        is_local = removals.c.node == ""
        ids = list(connection.scalars(select(removals.c.job).where(is_local).limit(JOBS_AT_ONCE)))
        for table in (reports, events):
            batch = select(table.c.seq).where(table.c.job.in_(ids)).limit(ROWS_AT_ONCE)
            if connection.execute(table.delete().where(table.c.seq.in_(batch))).rowcount == ROWS_AT_ONCE:
                return True
        connection.execute(removals.delete().where(is_local, removals.c.job.in_(ids)))
        return connection.scalar(select(removals.c.job).where(is_local).limit(1)) is not None


def attempt_folders(record: Record) -> set[AttemptFolderRef]:
    """Folders of a job's attempts; the id of a device group begins with its node."""
    return {
        AttemptFolderRef(devices_id.partition("/")[0], record.job.id, attempt.epoch)
        for attempt in record.attempts
        for devices_id, _ in attempt.allocation
    }


def _record_highest(connection: Connection, table: Table, seq: int) -> None:
    """Record the highest number, so that none is used twice even if the newest rows are removed."""
    of_table = counters.c.name == table.name
    if connection.execute(counters.update().where(of_table).values(value=seq)).rowcount == 0:
        connection.execute(counters.insert().values(name=table.name, value=seq))
