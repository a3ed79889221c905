"""Cells held against each other by their rounds: what is compared with what, and how. Pure.

A cell here is a line of a run, with its samples: {"case", "column", "host", "precision", "level", "regime", "id",
"blocks": [{"round", "calls", "parts_s", …}], "blocks_again"}.
"""

from collections.abc import Iterable
from typing import Any

from workers.benchmark import statistics
from workers.benchmark.statistics import Ratio

Data = dict[str, Any]


def find_reference(cell: Data, measured: Iterable[Data]) -> Data | None:
    """The same case in the first column that has it, at the same precision and level, else at its first ones; within
    that column its own first way. Of kernels the first that were named, in the same column. None for that itself."""
    same = [c for c in measured if c["case"] == cell["case"]]
    named = [c for c in same if c["column"] == cell["column"] and _way(c)[:3] == _way(cell)[:3]]
    if named and named[0]["id"] != cell["id"]:
        return named[0]
    first = [c for c in same if c["column"] == same[0]["column"]]
    alike = [c for c in first if _way(c) == _way(cell) and c["column"] != cell["column"]]
    chosen = (alike or first)[0]
    return None if chosen["id"] == cell["id"] else chosen


def _way(cell: Data) -> tuple[str, str, str, str]:
    return cell["precision"], cell["level"], cell["regime"], cell.get("kernels", "")


def compare_results(reference: Data, cell: Data) -> Ratio:
    """Rounds of one host stand side by side; those of two hosts share nothing but their number."""
    a, b = statistics.by_round(reference["blocks"]), statistics.by_round(cell["blocks"])
    common = sorted(a.keys() & b.keys())
    if reference["host"] == cell["host"] and len(common) >= statistics.LEAST_COMMON:
        return statistics.paired([a[n] for n in common], [b[n] for n in common])
    return statistics.unpaired(list(a.values()), list(b.values()))
