"""Cells held against each other by their rounds: what is compared with what, and how. Pure.

A cell here is a line of a run, with its samples: {"case", "column", "host", "precision", "level", "regime", "id",
"blocks": [{"round", "calls", "parts_s", …}], "blocks_again"}.
"""

from collections.abc import Iterable
from typing import Any

from orchestrator.benchmark import statistics
from orchestrator.benchmark.statistics import Ratio

LEAST_COMMON = 3
Data = dict[str, Any]


def undisturbed_s(block: Data) -> float:
    """Seconds per call of the quickest part: what else runs on a host makes parts slower, never quicker."""
    return float(min(block["parts_s"]) / block["calls"])


def reference_of(cell: Data, measured: Iterable[Data]) -> Data | None:
    """The same case in the first column that has it, at the same precision and level, else at its first ones; within
    that column its own first way. None for that itself."""
    same = [c for c in measured if c["case"] == cell["case"]]
    first = [c for c in same if c["column"] == same[0]["column"]]
    alike = [c for c in first if _way(c) == _way(cell) and c["column"] != cell["column"]]
    chosen = (alike or first)[0]
    return None if chosen["id"] == cell["id"] else chosen


def _way(cell: Data) -> tuple[str, str, str]:
    return cell["precision"], cell["level"], cell["regime"]


def compare(reference: Data, cell: Data) -> Ratio:
    """Rounds of one host stand side by side; those of two hosts share nothing but their number."""
    a, b = _by_round(reference["blocks"]), _by_round(cell["blocks"])
    common = sorted(a.keys() & b.keys())
    if reference["host"] == cell["host"] and len(common) >= LEAST_COMMON:
        return statistics.paired([a[n] for n in common], [b[n] for n in common])
    return statistics.apart(list(a.values()), list(b.values()))


def noise(cell: Data) -> float | None:
    """How far this host told the same from the same in these rounds; None for an arm that had no twin."""
    first, again = _by_round(cell["blocks"]), _by_round(cell["blocks_again"])
    common = sorted(first.keys() & again.keys())
    if len(common) < LEAST_COMMON:
        return None
    return statistics.noise_of(statistics.paired([first[n] for n in common], [again[n] for n in common]))


def _by_round(blocks: Iterable[Data]) -> dict[int, float]:
    return {b["round"]: undisturbed_s(b) for b in blocks}
