"""Store the lines of benchmark runs: appended while a run measures, read by benchmark reports at any later time."""

import threading
import time
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, func, select

from orchestrator.store.database.schema import benchmark_lines as table
from orchestrator.store.events.unit_of_work import UnitOfWork
from orchestrator.store.rows.codec import encode
from orchestrator.store.rows.damaged_rows import DamagedDataError, DamagedRow, DamageList, data_of, text_or_unknown

if TYPE_CHECKING:
    from orchestrator.store.database.database import Database
    from orchestrator.store.events.writer import StoreWriter

Data = dict[str, Any]
RUN_LINES = ("started", "targets", "ended", "baseline")


class BenchmarkLines:
    """Table of benchmark lines. It shares the store's writer: a line is durable when `append` returns; raises
    FleetError if it cannot be stored.
    """

    def __init__(self, database: "Database", writer: "StoreWriter", damage: DamageList):
        self._database, self._writer, self._damage = database, writer, damage
        self._lock = threading.Lock()
        self._counts: dict[str, int] | None = None

    def append(self, run: str, line: Data) -> None:
        row = {"run": run, "time": time.time(), "line": str(line["line"]), "data": encode(line)}
        self._writer.submit(UnitOfWork(benchmark_lines=[row]))
        with self._lock:
            if self._counts is not None and line["line"] == "result":
                self._counts[run] = self._counts.get(run, 0) + 1

    def read(self, run: str, after: int = 0) -> list[Data]:
        """Lines of one run, oldest first, each with its `seq` and `time`."""
        query = select(table).where(table.c.run == run, table.c.seq > after).order_by(table.c.seq)
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        return [line | {"seq": row.seq, "time": row.time} for row in rows if (line := self._line(row))]

    def _line(self, row: Row[Any]) -> Data | None:
        try:
            return data_of(row.data)
        except DamagedDataError as e:
            self._damage.add(
                DamagedRow("benchmark_lines", row.seq, text_or_unknown(row.run), text_or_unknown(row.line), str(e))
            )
            return None

    def result_counts(self) -> dict[str, int]:
        """Number of results of every run; cached in memory, since the planner reads it twice a second."""
        with self._lock:
            if self._counts is None:
                counts = select(table.c.run, func.count()).where(table.c.line == "result").group_by(table.c.run)
                with self._database.reading() as connection:
                    self._counts = {row[0]: row[1] for row in connection.execute(counts)}
            return dict(self._counts)

    def runs(self) -> list[Data]:
        """All runs, oldest first: {"run", "started": line, "targets", "ended", "baseline": the last such line or None,
        "results": number of results}."""
        ends = select(table).where(table.c.line.in_(RUN_LINES)).order_by(table.c.seq)
        result_counts = self.result_counts()
        by_run: dict[str, Data] = {}
        with self._database.reading() as connection:
            for row in connection.execute(ends):
                run_lines = by_run.setdefault(row.run, {"run": row.run, **dict.fromkeys(RUN_LINES)})
                if line := self._line(row):
                    run_lines[line["line"]] = line | {"time": row.time}
        return [
            run_lines | {"results": result_counts.get(run, 0)}
            for run, run_lines in by_run.items()
            if run_lines["started"]
        ]
