"""Compare runs over time: two runs result by result, a run with its baseline, and steps in a series. Pure.

Rounds of two runs share no background load, so they are never paired; and a busy host alone is no proof of a
regression.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

from orchestrator.benchmark.baselines import software
from orchestrator.benchmark.results import MEASURED, summarize
from workers.measurement import statistics
from workers.measurement.statistics import Verdict, fastest_part_s

SAME_OR_FASTER, SLOWER, WRONG, INCONCLUSIVE = 0, 1, 2, 3
MIN_RUNS = 2
"""Minimum number of runs on a new level before it counts as a step."""
Data = dict[str, Any]
Key = tuple[str, str, str, str, str, str]
PARTS = ("case", "precision", "level", "regime", "kernels", "kind")


def key(result: Data, targets: dict[str, Data]) -> Key:
    """Key that matches results of two runs: case, precision, level, regime, kernels ("" without) and kind.

    If a run has several devices of one kind, their target replaces the kind.
    """
    kind = str(targets.get(result["target"], {}).get("kind", result["target"]))
    is_only_device = sum(target.get("kind") == kind for target in targets.values()) < 2
    settings = result["precision"], result["level"], result["regime"], str(result.get("kernels", ""))
    return result["case"], *settings, kind if is_only_device else result["target"]


def compare(before: Iterable[Data], after: Iterable[Data], allow_busy_host: bool = False) -> Data:
    """Return {"results": [row], "only_before", "only_after", "environment": [differences]}.

    A row has ratio, interval, noise and verdict of the later run. If a host was not quiet, SLOWER requires
    `allow_busy_host`.
    """
    old, new = _run(before), _run(after)
    both = [k for k in new.results if k in old.results]
    ratios = [(k, _ratio(old.results[k], new.results[k])) for k in both if _timed(old, k) and _timed(new, k)]
    significant = dict(zip([k for k, _ in ratios], statistics.holm([ratio.p for _, ratio in ratios]), strict=True))
    rows = [_row(k, ratio, old, new, significant[k], allow_busy_host) for k, ratio in ratios]
    rows += [_untimed(k, old, new) for k in both if not (_timed(old, k) and _timed(new, k))]
    return {
        "before": old.summary["run"],
        "after": new.summary["run"],
        "results": rows,
        "only_before": [" ".join(filter(None, k)) for k in old.results if k not in new.results],
        "only_after": [" ".join(filter(None, k)) for k in new.results if k not in old.results],
        "environment": _differences(old.summary, new.summary),
    }


def gate(compared: Data) -> int:
    """Exit code of a comparison: 2 if a result is wrong, failed or lost, 1 slower, 3 inconclusive, 0 same or faster."""
    statuses = {row["status"] for row in compared["results"]}
    verdicts = {row["verdict"] for row in compared["results"] if row["status"] == MEASURED}
    if statuses & {"wrong", "failed", "lost"}:
        return WRONG
    if Verdict.SLOWER in verdicts:
        return SLOWER
    return INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts or not verdicts else SAME_OR_FASTER


class _Run:
    def __init__(self, summary: Data, results: dict[Key, Data], summaries: dict[Key, Data], classes: dict[str, str]):
        self.summary, self.results, self.summaries, self.classes = summary, results, summaries, classes


def _run(lines: Iterable[Data]) -> _Run:
    lines = list(lines)
    summary = summarize(lines)
    targets = {target["target"]: target for target in summary["targets"]}
    lines_by_id = {line["id"]: line for line in lines if line["line"] == "result"}
    results = {key(result, targets): result for result in lines_by_id.values()}
    summaries = {key(result, targets): result for result in summary["results"]}
    return _Run(summary, results, summaries, {host["host"]: host["class"] for host in summary["hosts"]})


def _timed(run: _Run, k: Key) -> bool:
    return run.summaries[k]["call_s"] is not None


def _ratio(old: Data, new: Data) -> statistics.Ratio:
    return statistics.unpaired([fastest_part_s(b) for b in old["blocks"]], [fastest_part_s(b) for b in new["blocks"]])


def _row(k: Key, ratio: statistics.Ratio, old: _Run, new: _Run, is_significant: bool, allow_busy_host: bool) -> Data:
    noise = max(_noise(old, k), _noise(new, k))
    classes = {run.classes.get(run.results[k]["host"], "quiet") for run in (old, new)}
    verdict = statistics.verdict(ratio, noise, is_significant, "unusable" not in classes)
    is_quiet = classes == {"quiet"}
    note, before_s = "", old.summaries[k]["fastest_part_s"]
    if verdict is Verdict.SLOWER and not is_quiet and not allow_busy_host:
        verdict, note = Verdict.INCONCLUSIVE, "slower, but a host was not quiet: measure both again on a quiet host"
    return {
        **_names(k), "status": MEASURED, **asdict(ratio), "noise": noise, "verdict": str(verdict), "note": note,
        "before_s": before_s, "after_s": before_s / ratio.ratio,
    }  # fmt: skip


def _noise(run: _Run, k: Key) -> float:
    noises = [
        result["noise"]
        for result in run.summaries.values()
        if result["case"] == k[0] and result.get("noise") is not None
    ]
    return float(max(noises, default=statistics.MIN_EFFECT))


def _untimed(k: Key, old: _Run, new: _Run) -> Data:
    """Row of a result without a time in one of the runs. Failing equally in both counts as unsupported."""
    before, after = old.summaries[k], new.summaries[k]
    status = after["status"] if after["status"] != before["status"] else "unsupported"
    return {**_names(k), "status": status, "note": after["reason"] or before["reason"], "verdict": ""}


def _names(k: Key) -> Data:
    return {name: value for name, value in zip(PARTS, k, strict=True) if value or name != "kernels"}


def _differences(old: Data, new: Data) -> list[Data]:
    """List changes between the runs per kind: torch, driver, versions, threads."""
    before = {target.get("kind"): software(target) for target in old["targets"]}
    changes = []
    for target in new["targets"]:
        was, now = before.get(target.get("kind"), {}), software(target)
        changes += [{"kind": target.get("kind"), "what": name, "before": was.get(name, ""), "after": now.get(name, "")}
                  for name in sorted({*was, *now}) if was and was.get(name) != now.get(name)]  # fmt: skip
    return changes


def series(runs: Iterable[Iterable[Data]], case: str) -> list[Data]:
    """Return one series per settings and kind of a case: {"kind", "precision", …, "points", "steps"}.

    `points` is [{"run", "started_at", "call_s"}], oldest run first.
    """
    points_by_key: dict[Key, list[Data]] = {}
    for lines in runs:
        run = _run(lines)
        for k, result in run.summaries.items():
            if (k[0] == case or k[0].startswith(f"{case}/")) and result["call_s"]:
                point = {
                    "run": run.summary["run"],
                    "started_at": run.summary["started_at"],
                    "call_s": result["fastest_part_s"],
                }
                points_by_key.setdefault(k, []).append(point)
    return [
        _names(k) | {"points": points, "steps": steps([p["call_s"] for p in points])}
        for k, points in points_by_key.items()
    ]


def steps(values: Sequence[float]) -> list[Data]:
    """Find where a series changes its level: {"at": index of the first value, "ratio": old level over new level}.

    Minimizes the L1 Potts functional over log times exactly: distances of the values from their segment's median, plus
    a penalty per segment. The penalty depends on the noise between neighbours, as in asv. Source: Storath, Weinmann,
    Unser 2017.
    """
    logs = [math.log(value) for value in values]
    if len(logs) < 2 * MIN_RUNS:
        return []
    jumps = sorted(abs(b - a) for a, b in pairwise(logs))
    noise = max(median(jumps) / 0.6745 / math.sqrt(2), math.log1p(statistics.MIN_EFFECT) / 2)
    penalty = 2 * noise * math.log(len(logs))
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(logs) + 1):
        options = [
            (best[start][0] + _distance(logs[start:end]) + penalty, start)
            for start in range(end)
            if end - start >= MIN_RUNS and (start == 0 or start >= MIN_RUNS)
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
    changes = zip(starts[1:], levels, levels[1:], strict=False)
    return [{"at": at, "ratio": math.exp(before - after)} for at, before, after in changes]
