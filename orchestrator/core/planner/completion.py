"""Rates that nobody measured, estimated from other workloads on the same kinds: of one workload, kinds are taken to
differ as they do of the others (a matrix of log rates of rank one).

What is estimated is never measured, and never shown as that: it comes with an interval and the number of workloads
behind it. Where fewer than LEAST were measured on both kinds nothing is estimated (benchmarks/estimates.py).
"""

from dataclasses import dataclass

import numpy as np

from orchestrator.core.planner.planner_jobs import Floats, Integers

LEAST = 3
"""Other workloads that were measured on both kinds."""

MOST_KNOWN = 1
"""Kinds that the workload itself was measured on. With one, an estimate chose faster devices than having no number did,
also from workloads of other models alone; with two, it did not.
"""

COVERS = 0.9
"""Of true rates, so many are to lie in the interval."""

FEW = 2.0
"""The interval is so many times as wide as all deviations seen where they are too few to leave one in ten out."""


@dataclass(frozen=True, slots=True)
class Completed:
    """All (workloads, kinds); NaN where it was measured or nothing is estimated. `count`: workloads behind each."""

    rate: Floats
    low: Floats
    high: Floats
    count: Integers


def completed(table: "Floats | list[list[float]]", most_known: int = MOST_KNOWN) -> Completed:
    """`table` (workloads, kinds): rates of one device, above 0, NaN where nobody measured. A factor of a row changes
    nothing but that row's estimates by the same factor.
    """
    logs = np.log(np.asarray(table, np.float64))
    rate, low, high = np.full((3, *logs.shape), np.nan)
    found = Completed(rate, low, high, np.zeros(logs.shape, np.int64))
    for row, kind in np.argwhere(np.isnan(logs)).tolist():
        known = np.flatnonzero(~np.isnan(logs[row])).tolist()
        if len(known) > most_known:
            continue
        others = np.delete(logs, row, axis=0)
        ways = [_from(others, logs[row, at], at, kind) for at in known]
        usable = [way for way in ways if way[2] >= LEAST]
        if usable:
            middle, wide, count = min(usable, key=lambda way: way[1])
            found.rate[row, kind], found.count[row, kind] = np.exp(middle), count
            found.low[row, kind], found.high[row, kind] = np.exp(middle - wide), np.exp(middle + wide)
    return found


def _from(others: Floats, own: float, at: int, kind: int) -> tuple[float, float, int]:
    """(log of the rate, half the width of its interval in logs, workloads) from the kind `at` alone."""
    apart = others[:, kind] - others[:, at]
    apart = apart[~np.isnan(apart)]
    if not len(apart):
        return 0.0, np.inf, 0
    middle = float(np.median(apart))
    deviations = np.sort(np.abs(apart - middle))
    needed = int(np.ceil((len(apart) + 1) * COVERS))
    wide = deviations[needed - 1] if needed <= len(apart) else FEW * deviations[-1]
    return own + middle, float(wide), len(apart)
