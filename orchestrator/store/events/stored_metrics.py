"""Store the metrics of attempts: queued, because no caller waits for them, and read by job."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, select

from orchestrator.store.database.schema import jobs
from orchestrator.store.database.schema import reports as table
from orchestrator.store.rows.damaged_rows import DamagedDataError, DamagedRow, DamageList, data_of, text_or_unknown
from orchestrator.store.rows.job_table import IDS_PER_QUERY, METRICS

if TYPE_CHECKING:
    from orchestrator.store.database.database import Database
    from orchestrator.store.events.writer import StoreWriter

Data = dict[str, Any]


class StoredMetrics:
    """Table of metrics, one row for each step. It shares the store's writer."""

    def __init__(self, database: "Database", writer: "StoreWriter", damage: DamageList):
        self._database, self._writer, self._damage = database, writer, damage

    def queue(self, row: Data) -> None:
        """Queue metrics of one step to be written soon. Never blocks: if too many wait, some are dropped and counted
        in `lost`.
        """
        self._writer.submit_metrics(row)

    @property
    def lost(self) -> int:
        """Number of rows dropped since the start, because too many waited or the disk was full."""
        return self._writer.metrics_lost

    def read(self, job: str, after: int = 0, limit: int | None = None, newest: bool = False) -> list[Data]:
        """Metrics of a job, oldest first, with seq, attempt, step and time of each.

        `limit` leaves out the last ones, or with `newest` the first ones.
        """
        order = table.c.seq.desc() if newest else table.c.seq
        query = select(table).where(table.c.job == job, table.c.seq > after).order_by(order).limit(limit)
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        ordered = reversed(rows) if newest else rows
        return [report for row in ordered if (report := self._report(row))]

    def last(self, job: str) -> Data:
        """The newest metrics of a job, {} if it has none."""
        newest = select(table).where(table.c.job == job).order_by(table.c.seq.desc()).limit(1)
        with self._database.reading() as connection:
            row = connection.execute(newest).first()
        return self._metrics(row) or {} if row else {}

    def last_of(self, ids: Sequence[str]) -> dict[str, Data]:
        """Like `last`, for many jobs. Jobs without metrics, or with unreadable ones, are left out."""
        by_job: dict[str, Data] = {}
        for start in range(0, len(ids), IDS_PER_QUERY):
            query = select(jobs.c.id, METRICS).where(jobs.c.id.in_(ids[start : start + IDS_PER_QUERY]))
            with self._database.reading() as connection:
                rows = connection.execute(query).all()
            for row in rows:
                try:
                    by_job[row.id] = data_of(row.metrics) if row.metrics is not None else {}
                except DamagedDataError:
                    continue  # recorded as damage when the rows themselves are read
        return {job: data for job, data in by_job.items() if data}

    def _report(self, row: Row[Any]) -> Data | None:
        metrics = self._metrics(row)
        if metrics is None:
            return None
        return {"seq": row.seq, "attempt": row.epoch, "step": row.step, "time": row.time, "metrics": metrics}

    def _metrics(self, row: Row[Any]) -> Data | None:
        try:
            return data_of(row.data)
        except DamagedDataError as e:
            self._damage.add(DamagedRow("reports", row.seq, text_or_unknown(row.job), "report", str(e)))
            return None
