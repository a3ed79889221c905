"""Runs over time: two of them cell by cell, one against its baseline, and steps in a series. Pure.

Rounds of two runs share no background load, so they are never paired; and a busy host proves no regression by itself.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

from orchestrator.benchmark.baselines import software
from orchestrator.benchmark.results import MEASURED, summarize
from workers.benchmark import statistics
from workers.benchmark.statistics import Verdict, fastest_part_s

SAME_OR_FASTER, SLOWER, WRONG, INCONCLUSIVE = 0, 1, 2, 3
LEAST_RUNS = 2
"""So many runs a new level must last before it is called a step."""
Data = dict[str, Any]
Key = tuple[str, str, str, str, str, str]
PARTS = ("case", "precision", "level", "regime", "kernels", "kind")


def key(cell: Data, columns: dict[str, Data]) -> Key:
    """What makes cells of two runs the same: case, precision, level, regime, kernels ("" without any) and kind; of
    several devices of one kind the column."""
    kind = str(columns.get(cell["column"], {}).get("kind", cell["column"]))
    alone = sum(column.get("kind") == kind for column in columns.values()) < 2
    way = cell["precision"], cell["level"], cell["regime"], str(cell.get("kernels", ""))
    return cell["case"], *way, kind if alone else cell["column"]


def compare(before: Iterable[Data], after: Iterable[Data], trust_shared: bool = False) -> Data:
    """{"cells": [row], "only_before", "only_after", "environment": [differences]}. A row has ratio, interval, noise,
    verdict of the later run. On a host that was not quiet SLOWER is only said with `trust_shared`.
    """
    old, new = _run(before), _run(after)
    both = [k for k in new.cells if k in old.cells]
    found = [(k, _ratio(old.cells[k], new.cells[k])) for k in both if _timed(old, k) and _timed(new, k)]
    held = dict(zip([k for k, _ in found], statistics.holm([ratio.p for _, ratio in found]), strict=True))
    rows = [_row(k, ratio, old, new, held[k], trust_shared) for k, ratio in found]
    rows += [_untimed(k, old, new) for k in both if not (_timed(old, k) and _timed(new, k))]
    return {
        "before": old.told["run"],
        "after": new.told["run"],
        "cells": rows,
        "only_before": [" ".join(filter(None, k)) for k in old.cells if k not in new.cells],
        "only_after": [" ".join(filter(None, k)) for k in new.cells if k not in old.cells],
        "environment": _differences(old.told, new.told),
    }


def gate(compared: Data) -> int:
    """0 same or faster, 1 slower, 2 wrong result, 3 inconclusive: the worst of all cells."""
    statuses = {row["status"] for row in compared["cells"]}
    verdicts = {row["verdict"] for row in compared["cells"] if row["status"] == MEASURED}
    if statuses & {"wrong", "failed", "lost"}:
        return WRONG
    if Verdict.SLOWER in verdicts:
        return SLOWER
    return INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts or not verdicts else SAME_OR_FASTER


class _Run:
    def __init__(self, told: Data, cells: dict[Key, Data], summaries: dict[Key, Data], classes: dict[str, str]):
        self.told, self.cells, self.summaries, self.classes = told, cells, summaries, classes


def _run(lines: Iterable[Data]) -> _Run:
    lines = list(lines)
    told = summarize(lines)
    columns = {column["column"]: column for column in told["columns"]}
    raw = {line["id"]: line for line in lines if line["line"] == "cell"}
    cells = {key(cell, columns): cell for cell in raw.values()}
    summaries = {key(cell, columns): cell for cell in told["cells"]}
    return _Run(told, cells, summaries, {host["host"]: host["class"] for host in told["hosts"]})


def _timed(run: _Run, k: Key) -> bool:
    return run.summaries[k]["call_s"] is not None


def _ratio(old: Data, new: Data) -> statistics.Ratio:
    return statistics.unpaired([fastest_part_s(b) for b in old["blocks"]], [fastest_part_s(b) for b in new["blocks"]])


def _row(k: Key, ratio: statistics.Ratio, old: _Run, new: _Run, holds: bool, trust_shared: bool) -> Data:
    noise = max(_noise(old, k), _noise(new, k))
    classes = {run.classes.get(run.cells[k]["host"], "quiet") for run in (old, new)}
    verdict = statistics.verdict(ratio, noise, holds, "unusable" not in classes)
    quiet = classes == {"quiet"}
    note, before_s = "", old.summaries[k]["undisturbed_s"]
    if verdict is Verdict.SLOWER and not quiet and not trust_shared:
        verdict, note = Verdict.INCONCLUSIVE, "slower, on a host that was not quiet: measure both again there"
    return {
        **_names(k), "status": MEASURED, **asdict(ratio), "noise": noise, "verdict": str(verdict), "note": note,
        "before_s": before_s, "after_s": before_s / ratio.ratio,
    }  # fmt: skip


def _noise(run: _Run, k: Key) -> float:
    told = [cell["noise"] for cell in run.summaries.values() if cell["case"] == k[0] and cell.get("noise") is not None]
    return float(max(told, default=statistics.LEAST_EFFECT))


def _untimed(k: Key, old: _Run, new: _Run) -> Data:
    """Of a cell without a time in one of them. What both cannot do is no news."""
    was, now = old.summaries[k], new.summaries[k]
    status = now["status"] if now["status"] != was["status"] else "unsupported"
    return {**_names(k), "status": status, "note": now["reason"] or was["reason"], "verdict": ""}


def _names(k: Key) -> Data:
    return {name: value for name, value in zip(PARTS, k, strict=True) if value or name != "kernels"}


def _differences(old: Data, new: Data) -> list[Data]:
    """Per kind what changed between the runs: torch, driver, versions, threads."""
    before = {column.get("kind"): software(column) for column in old["columns"]}
    found = []
    for column in new["columns"]:
        was, now = before.get(column.get("kind"), {}), software(column)
        found += [{"kind": column.get("kind"), "what": name, "before": was.get(name, ""), "after": now.get(name, "")}
                  for name in sorted({*was, *now}) if was and was.get(name) != now.get(name)]  # fmt: skip
    return found


def series(runs: Iterable[Iterable[Data]], case: str) -> list[Data]:
    """One series per way and kind of a case, oldest run first: {"kind", "precision", …, "points": [{"run", "began_s",
    "call_s"}], "steps"}.
    """
    found: dict[Key, list[Data]] = {}
    for lines in runs:
        run = _run(lines)
        for k, cell in run.summaries.items():
            if (k[0] == case or k[0].startswith(f"{case}/")) and cell["call_s"]:
                point = {"run": run.told["run"], "began_s": run.told["began_s"], "call_s": cell["undisturbed_s"]}
                found.setdefault(k, []).append(point)
    return [
        _names(k) | {"points": points, "steps": steps([p["call_s"] for p in points])} for k, points in found.items()
    ]


def steps(values: Sequence[float]) -> list[Data]:
    """Where a series settles on another level: {"at": index of the first there, "ratio": the level before over this}.

    The L1 Potts functional over log times, solved exactly: the segments' distances from their medians, plus a price for
    each segment. The price follows the noise between neighbours, as asv's does. Source: Storath, Weinmann, Unser 2017.
    """
    logs = [math.log(value) for value in values]
    if len(logs) < 2 * LEAST_RUNS:
        return []
    jumps = sorted(abs(b - a) for a, b in pairwise(logs))
    noise = max(median(jumps) / 0.6745 / math.sqrt(2), math.log1p(statistics.LEAST_EFFECT) / 2)
    price = 2 * noise * math.log(len(logs))
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(logs) + 1):
        options = [
            (best[start][0] + _distance(logs[start:end]) + price, start)
            for start in range(end)
            if end - start >= LEAST_RUNS and (start == 0 or start >= LEAST_RUNS)
        ]
        best.append(min(options, default=(math.inf, 0)))
    return _levels(logs, best)


def _distance(logs: Sequence[float]) -> float:
    middle = median(logs)
    return sum(abs(value - middle) for value in logs)


def _levels(logs: Sequence[float], best: Sequence[tuple[float, int]]) -> list[Data]:
    ends = [len(logs)]
    while best[ends[-1]][1]:
        ends.append(best[ends[-1]][1])
    starts = [0, *reversed(ends[1:])]
    levels = [median(logs[a:b]) for a, b in zip(starts, [*starts[1:], len(logs)], strict=True)]
    told = zip(starts[1:], levels, levels[1:], strict=False)
    return [{"at": at, "ratio": math.exp(before - after)} for at, before, after in told]
