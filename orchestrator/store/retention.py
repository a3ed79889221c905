"""Old jobs are removed: first from the table of jobs, then what else there is of them, a little at a time.

A job is gone for users with one small transaction, which also writes down what is left to remove: its events and
reports here, its attempts' folders on nodes. A server that is killed in between goes on where it stopped.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Table, and_, or_, select, tuple_

from orchestrator.core.fold import Record
from orchestrator.store.job_cache import JobCache
from orchestrator.store.schema import counters, events, jobs, removals, reports, requests
from orchestrator.store.unit_of_work import UnitOfWork

if TYPE_CHECKING:
    from orchestrator.store.database import Database
    from orchestrator.store.job_table import JobTable
    from orchestrator.store.writer import StoreWriter

JOBS_AT_ONCE = 50
ROWS_AT_ONCE = 500
"""Most of one transaction: a submit waits for it a few milliseconds."""


@dataclass(frozen=True, slots=True)
class AttemptFolderRef:
    """The folder of an attempt of a removed job."""

    node: str
    job: str
    epoch: int


class Retention:
    """Each call is one transaction of the store's writer. Raises FleetError when it cannot be written."""

    def __init__(self, database: "Database", writer: "StoreWriter", ledger: JobCache, table: "JobTable"):
        self._database, self._writer, self._ledger, self._table = database, writer, ledger, table

    def remove_jobs(self, ended_before_s: float, up_to: int) -> int:
        """Some of those that ended before that and whose last event is numbered at most `up_to`: how many."""
        old = select(jobs.c.id).where(~jobs.c.open, jobs.c.ended < ended_before_s, jobs.c.seq <= up_to)
        with self._database.reading() as connection:
            ids = list(connection.scalars(old.order_by(jobs.c.ended).limit(JOBS_AT_ONCE)))
        if ids:
            self._submit(lambda connection: self._remove(connection, ids))
            self._ledger.forget(ids)
        return len(ids)

    def remove_rows(self) -> bool:
        """Some reports and events of removed jobs. Whether more are left."""
        with self._database.reading() as connection:
            if connection.scalar(select(removals.c.job).where(removals.c.node == "").limit(1)) is None:
                return False
        return bool(self._submit(self._remove_rows))

    def remove_keys(self, used_before_s: float) -> bool:
        """Some idempotency keys. Whether more are left."""
        old = select(requests.c.key).where(requests.c.time < used_before_s)
        with self._database.reading() as connection:
            keys = list(connection.scalars(old.order_by(requests.c.time).limit(ROWS_AT_ONCE)))
        if keys:
            self._submit(lambda connection: connection.execute(requests.delete().where(requests.c.key.in_(keys))))
        return len(keys) == ROWS_AT_ONCE

    def nodes(self) -> list[str]:
        """Those with folders that are left to remove."""
        left = select(removals.c.node).distinct().where(removals.c.node != "").order_by(removals.c.node)
        with self._database.reading() as connection:
            return list(connection.scalars(left))

    def places(self, node: str, after: AttemptFolderRef | None = None) -> list[AttemptFolderRef]:
        """Some folders that are left to remove there, by job and epoch, beyond `after`."""
        left = select(removals).where(removals.c.node == node).order_by(removals.c.job, removals.c.epoch)
        if after is not None:
            left = left.where(tuple_(removals.c.job, removals.c.epoch) > (after.job, after.epoch))
        with self._database.reading() as connection:
            return [
                AttemptFolderRef(row.node, row.job, row.epoch) for row in connection.execute(left.limit(ROWS_AT_ONCE))
            ]

    def removed(self, places: list[AttemptFolderRef]) -> None:
        """Those folders are no more."""
        each = [and_(removals.c.job == p.job, removals.c.node == p.node, removals.c.epoch == p.epoch) for p in places]
        if each:
            self._submit(lambda connection: connection.execute(removals.delete().where(or_(*each))))

    def give_up(self, node: str, before_s: float) -> None:
        """Folders of jobs that were removed before that are left to their node, which is not there to remove them."""
        old = and_(removals.c.node == node, removals.c.time < before_s)
        self._submit(lambda connection: connection.execute(removals.delete().where(old)))

    def _submit(self, action: Any) -> Any:
        return self._writer.submit(UnitOfWork(action=action))

    def _remove(self, connection: Connection, ids: list[str]) -> None:
        now_s = time.time()
        left = [{"job": job, "node": "", "epoch": 0, "time": now_s} for job in ids]
        for record in self._table.load_some(connection, ids):
            left += [{"job": p.job, "node": p.node, "epoch": p.epoch, "time": now_s} for p in attempt_folders(record)]
        connection.execute(removals.insert(), left)
        connection.execute(jobs.delete().where(jobs.c.id.in_(ids)))

    def _remove_rows(self, connection: Connection) -> bool:
        _keep_highest(connection, events, self._writer.last_seq)
        _keep_highest(connection, reports, self._writer.last_report)
        here = removals.c.node == ""
        ids = list(connection.scalars(select(removals.c.job).where(here).limit(JOBS_AT_ONCE)))
        for table in (reports, events):
            some = select(table.c.seq).where(table.c.job.in_(ids)).limit(ROWS_AT_ONCE)
            if connection.execute(table.delete().where(table.c.seq.in_(some))).rowcount == ROWS_AT_ONCE:
                return True
        connection.execute(removals.delete().where(here, removals.c.job.in_(ids)))
        return connection.scalar(select(removals.c.job).where(here).limit(1)) is not None


def attempt_folders(record: Record) -> set[AttemptFolderRef]:
    """A devices id begins with its node."""
    return {
        AttemptFolderRef(devices_id.partition("/")[0], record.job.id, attempt.epoch)
        for attempt in record.attempts
        for devices_id, _ in attempt.leases
    }


def _keep_highest(connection: Connection, table: Table, seq: int) -> None:
    """No number is given twice, though the newest rows may go."""
    mine = counters.c.name == table.name
    if connection.execute(counters.update().where(mine).values(value=seq)).rowcount == 0:
        connection.execute(counters.insert().values(name=table.name, value=seq))
