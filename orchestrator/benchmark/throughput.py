"""From the lines of runs to the planner's table: the newest rate of each workload, mode, kind and precision."""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.benchmark.results import joules_per_item
from orchestrator.core.throughput import Estimated, Key, Measured, Throughput, of_folder
from workers.benchmark import statistics

if TYPE_CHECKING:
    from orchestrator.store.benchmark_lines import BenchmarkLines

Data = dict[str, Any]
DEFAULT_LEVEL = "O1"
"""What `ctx.prepare` applies unless told otherwise."""


def rows(lines: Iterable[Data]) -> Iterator[tuple[Key, Measured]]:
    """What one run says. A wrong or unsteady cell says nothing, nor one at another level than O1 or by kernels."""
    lines = list(lines)
    begun: Data = next((line for line in lines if line["line"] == "begun"), {})
    kinds = {line["column"]: line["facts"].get("kind", "") for line in lines if line["line"] == "column"}
    for cell in lines:
        if cell["line"] != "cell" or not _counts(cell):
            continue
        told = _measured(cell, str(begun.get("run", "")))
        names = [str(cell["workload"])]
        if cell["case"].startswith("user/"):
            names.append(of_folder(begun.get("content_sha", "")))
        for name in filter(None, names):
            yield (name, cell.get("mode", "forward"), kinds.get(cell["column"], ""), cell["precision"]), told


def _counts(cell: Data) -> bool:
    told = cell["status"] == "measured" and cell["blocks"]
    return bool(told) and (cell["level"], cell["regime"], cell.get("kernels", "")) == (DEFAULT_LEVEL, "hot", "")


def _measured(cell: Data, run: str) -> Measured:
    call = statistics.interval([statistics.call_s(b) for b in cell["blocks"]])
    items = float(cell.get("items") or 1)
    at_s = float(cell["blocks"][-1]["at"])
    return Measured(
        items / call.median,
        items / call.high,
        items / call.low,
        str(cell["item"]),
        run,
        at_s,
        joules_per_item(cell) or 0.0,
    )


def estimates(known: Mapping[Key, Measured]) -> dict[Key, Estimated]:
    """Of each workload on kinds on which others were measured: for each mode and precision alone."""
    found: dict[Key, Estimated] = {}
    for mode, precision in sorted({(mode, precision) for _, mode, _, precision in known}):
        here = {(w, kind): m for (w, m_, kind, p), m in known.items() if (m_, p) == (mode, precision)}
        for (workload, kind), guess in _completed(here).items():
            found[workload, mode, kind, precision] = guess
    return found


def _completed(known: Mapping[tuple[str, str], Measured]) -> dict[tuple[str, str], Estimated]:
    """By workload and kind. A workload that was measured once and has two names counts once."""
    from orchestrator.core.planner.completion import LEAST, completed  # with NumPy

    kinds = sorted({kind for _, kind in known})
    named: dict[tuple[Measured | None, ...], list[str]] = {}
    for workload in sorted({workload for workload, _ in known}):
        named.setdefault(tuple(known.get((workload, kind)) for kind in kinds), []).append(workload)
    if len(named) <= LEAST or len(kinds) < 2:
        return {}
    told = completed([[one.items_per_s if one else math.nan for one in row] for row in named])
    found: dict[tuple[str, str], Estimated] = {}
    for at, (row, names) in enumerate(named.items()):
        item = next(one.item for one in row if one)
        for column, kind in enumerate(kinds):
            if (count := int(told.count[at, column])) > 0:
                rate, low, high = (float(part[at, column]) for part in (told.rate, told.low, told.high))
                found |= {(name, kind): Estimated(rate, low, high, item, count) for name in names}
    return found


class RateTable:
    """The table of a store, read anew when a run has ended or a case of one came in. Safe to use from many threads."""

    def __init__(self, lines: "BenchmarkLines"):
        self._lines = lines
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}
        self._heads: dict[str, list[Data]] = {}
        self._read_to: dict[str, int] = {}
        self._rows: dict[Key, Measured] = {}
        self._estimates: dict[Key, Estimated] = {}

    def newest(self) -> Throughput:
        with self._lock:
            counts = self._lines.cell_counts()
            changed = [run for run, cells in counts.items() if self._known.get(run) != cells]
            for run in changed:
                self._known[run] = counts[run]
                self._take(run)
            if changed:
                self._estimates = estimates(self._rows)
            return Throughput(dict(self._rows), self._estimates)

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
