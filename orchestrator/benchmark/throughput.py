"""From the lines of runs to the planner's table: the newest rate of each workload, mode, kind and precision."""

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from orchestrator.core.throughput import Key, Measured, Throughput
from workers.benchmark import statistics

if TYPE_CHECKING:
    from orchestrator.store.benchmarks import BenchmarkLines

Data = dict[str, Any]
DEFAULT_LEVEL = "O1"
"""What `ctx.prepare` applies unless told otherwise."""


def of_package(sha: str) -> str:
    """The name of a workload that is known by its folder only."""
    return f"package:{sha[:16]}" if sha else ""


def rows(lines: Iterable[Data]) -> Iterator[tuple[Key, Measured]]:
    """What one run says. A wrong or unsteady cell says nothing, a model's cells at another level than O1 neither."""
    lines = list(lines)
    begun: Data = next((line for line in lines if line["line"] == "begun"), {})
    kinds = {line["column"]: line["facts"].get("kind", "") for line in lines if line["line"] == "column"}
    for cell in lines:
        if cell["line"] != "cell" or not _counts(cell):
            continue
        told = _measured(cell, str(begun.get("run", "")))
        names = [str(cell["workload"])]
        names += [of_package(begun["package"])] if cell["case"].startswith("user/") and begun.get("package") else []
        for name in names:
            yield (name, cell.get("mode", "forward"), kinds.get(cell["column"], ""), cell["precision"]), told


def _counts(cell: Data) -> bool:
    told = cell["status"] == "measured" and cell["blocks"]
    return bool(told) and (cell["level"], cell["regime"]) == (DEFAULT_LEVEL, "hot")


def _measured(cell: Data, run: str) -> Measured:
    call = statistics.interval([statistics.call_s(b) for b in cell["blocks"]])
    items = float(cell.get("items") or 1)
    at_s = float(cell["blocks"][-1]["at"])
    return Measured(items / call.median, items / call.high, items / call.low, str(cell["item"]), run, at_s)


class Rates:
    """The table of a store, read anew when a run has ended or a case of one came in. Safe to use from many threads."""

    def __init__(self, lines: "BenchmarkLines"):
        self._lines = lines
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}
        self._heads: dict[str, list[Data]] = {}
        self._read_to: dict[str, int] = {}
        self._rows: dict[Key, Measured] = {}

    def newest(self) -> Throughput:
        with self._lock:
            for run, cells in self._lines.cell_counts().items():
                if self._known.get(run) != cells:
                    self._known[run] = cells
                    self._take(run)
            return Throughput(dict(self._rows))

    def _take(self, run: str) -> None:
        """Only what came since the last look: a planner asks twice a second."""
        read_to = self._read_to.get(run, 0)
        new = self._lines.read(run, after=read_to)
        lines = [*self._heads.get(run, []), *new]
        self._heads[run] = [line for line in lines if line["line"] in ("begun", "column")]
        self._read_to[run] = max((line["seq"] for line in new), default=read_to)
        for key, told in rows(lines):
            if key not in self._rows or self._rows[key].at_s <= told.at_s:
                self._rows[key] = told
