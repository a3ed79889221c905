"""Planner's table of throughput from the lines of runs: newest rate by workload, mode, kind and precision."""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.benchmark.results import joules_per_item
from orchestrator.core.throughput import Estimated, Key, Measured, Throughput, folder_workload
from workers.measurement import statistics

if TYPE_CHECKING:
    from orchestrator.store.events.benchmark_lines import BenchmarkLines

Data = dict[str, Any]
DEFAULT_LEVEL = "O1"
"""Default level of `ctx.prepare`."""


def rows(lines: Iterable[Data]) -> Iterator[tuple[Key, Measured]]:
    """Yield the rates of one run. Only correct results at level O1, hot and without special kernels count."""
    lines = list(lines)
    header: Data = next((line for line in lines if line["line"] == "started"), {})
    kinds = {line["target"]: line["facts"].get("kind", "") for line in lines if line["line"] == "target"}
    for result in lines:
        if result["line"] != "result" or not _counts(result):
            continue
        rate = _measured(result, str(header.get("run", "")))
        names = [str(result["workload"])]
        if result["case"].startswith("user/"):
            names.append(folder_workload(header.get("content_sha", "")))
        for name in filter(None, names):
            yield (name, result.get("mode", "forward"), kinds.get(result["target"], ""), result["precision"]), rate


def _counts(result: Data) -> bool:
    is_measured = result["status"] == "measured" and result["blocks"]
    return bool(is_measured) and (result["level"], result["regime"], result.get("kernels", "")) == (
        DEFAULT_LEVEL,
        "hot",
        "",
    )


def _measured(result: Data, run: str) -> Measured:
    call = statistics.interval([statistics.call_s(b) for b in result["blocks"]])
    items = float(result.get("items") or 1)
    at_s = float(result["blocks"][-1]["at"])
    return Measured(
        items / call.median,
        items / call.high,
        items / call.low,
        str(result["item"]),
        run,
        at_s,
        joules_per_item(result) or 0.0,
    )


def estimates(measured: Mapping[Key, Measured]) -> dict[Key, Estimated]:
    """Estimate the rate of each workload on kinds on which only others were measured, per mode and precision."""
    estimated: dict[Key, Estimated] = {}
    for mode, precision in sorted({(mode, precision) for _, mode, _, precision in measured}):
        rates = {(w, kind): m for (w, m_, kind, p), m in measured.items() if (m_, p) == (mode, precision)}
        for (workload, kind), estimate in _complete_table(rates).items():
            estimated[workload, mode, kind, precision] = estimate
    return estimated


def _complete_table(rates: Mapping[tuple[str, str], Measured]) -> dict[tuple[str, str], Estimated]:
    """Complete the table of workloads and kinds. A workload with two names counts once."""
    from orchestrator.core.plan.arrays.completion import MIN_SHARED_WORKLOADS, estimate_rates  # imports NumPy

    kinds = sorted({kind for _, kind in rates})
    names_by_rates: dict[tuple[Measured | None, ...], list[str]] = {}
    for workload in sorted({workload for workload, _ in rates}):
        names_by_rates.setdefault(tuple(rates.get((workload, kind)) for kind in kinds), []).append(workload)
    if len(names_by_rates) <= MIN_SHARED_WORKLOADS or len(kinds) < 2:
        return {}
    completion = estimate_rates([[one.items_per_s if one else math.nan for one in row] for row in names_by_rates])
    estimated: dict[tuple[str, str], Estimated] = {}
    for index, (row, names) in enumerate(names_by_rates.items()):
        item = next(one.item for one in row if one)
        for kind_index, kind in enumerate(kinds):
            if (count := int(completion.count[index, kind_index])) > 0:
                rate, low, high = (
                    float(part[index, kind_index]) for part in (completion.rate, completion.low, completion.high)
                )
                estimated |= {(name, kind): Estimated(rate, low, high, item, count) for name in names}
    return estimated


class RateTable:
    """Throughput table of a store, updated when a run has new results. Thread-safe."""

    def __init__(self, lines: "BenchmarkLines"):
        self._lines = lines
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._headers: dict[str, list[Data]] = {}
        self._read_to: dict[str, int] = {}
        self._rows: dict[Key, Measured] = {}
        self._estimates: dict[Key, Estimated] = {}

    def newest(self) -> Throughput:
        with self._lock:
            counts = self._lines.result_counts()
            changed = [run for run, count in counts.items() if self._counts.get(run) != count]
            for run in changed:
                self._counts[run] = counts[run]
                self._read_new(run)
            if changed:
                self._estimates = estimates(self._rows)
            return Throughput(dict(self._rows), self._estimates)

    def _read_new(self, run: str) -> None:
        """Read only lines since the last call, because the planner calls twice a second."""
        read_to = self._read_to.get(run, 0)
        new_lines = self._lines.read(run, after=read_to)
        lines = [*self._headers.get(run, []), *new_lines]
        self._headers[run] = [line for line in lines if line["line"] in ("started", "target")]
        self._read_to[run] = max((line["seq"] for line in new_lines), default=read_to)
        for key, rate in rows(lines):
            if key not in self._rows or self._rows[key].at_s <= rate.at_s:
                self._rows[key] = rate
