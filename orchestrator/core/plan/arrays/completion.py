"""Estimate unmeasured rates from other workloads: kinds are assumed to differ equally for all of them.

The matrix of log rates is then of rank one. An estimate is never presented as measured: it has an interval and the
number of workloads behind it. With fewer than MIN_SHARED_WORKLOADS measured on both kinds there is no estimate
(benchmarks/estimates.py).
"""

from dataclasses import dataclass

import numpy as np

from orchestrator.core.plan.arrays.planner_jobs import Floats, Integers

MIN_SHARED_WORKLOADS = 3
"""Minimum number of other workloads measured on both kinds."""

MAX_MEASURED_KINDS = 1
"""Maximum number of kinds on which the workload itself was measured.

With one, estimates led to faster devices than no number, even from workloads of other models only; with two, they did
not.
"""

COVERAGE = 0.9
"""Fraction of true rates that the interval should contain."""

FEW_FACTOR = 2.0
"""Factor on the largest deviation for the interval, if there are too few deviations to exclude one in ten."""


@dataclass(frozen=True, slots=True)
class RateEstimates:
    """Estimates (workloads, kinds); NaN if measured or not estimated. `count`: number of workloads behind each."""

    rate: Floats
    low: Floats
    high: Floats
    count: Integers


def estimate_rates(table: "Floats | list[list[float]]", max_measured: int = MAX_MEASURED_KINDS) -> RateEstimates:
    """Estimate the missing rates of `table` (workloads, kinds): rates of one device, above 0, NaN if unmeasured.

    Scaling a row scales only the estimates of that row.
    """
    logs = np.log(np.asarray(table, np.float64))
    rate, low, high = np.full((3, *logs.shape), np.nan)
    estimates = RateEstimates(rate, low, high, np.zeros(logs.shape, np.int64))
    for row, kind in np.argwhere(np.isnan(logs)).tolist():
        measured_kinds = np.flatnonzero(~np.isnan(logs[row])).tolist()
        if len(measured_kinds) > max_measured:
            continue
        others = np.delete(logs, row, axis=0)
        candidates = [_estimate_from(others, logs[row, at], at, kind) for at in measured_kinds]
        usable = [candidate for candidate in candidates if candidate[2] >= MIN_SHARED_WORKLOADS]
        if usable:
            middle, wide, count = min(usable, key=lambda candidate: candidate[1])
            estimates.rate[row, kind], estimates.count[row, kind] = np.exp(middle), count
            estimates.low[row, kind], estimates.high[row, kind] = np.exp(middle - wide), np.exp(middle + wide)
    return estimates


def _estimate_from(others: Floats, own: float, at: int, kind: int) -> tuple[float, float, int]:
    """Return (log rate, half the width of its interval in logs, number of workloads) from kind `at` alone."""
    differences = others[:, kind] - others[:, at]
    differences = differences[~np.isnan(differences)]
    if not len(differences):
        return 0.0, np.inf, 0
    middle = float(np.median(differences))
    deviations = np.sort(np.abs(differences - middle))
    needed = int(np.ceil((len(differences) + 1) * COVERAGE))
    wide = deviations[needed - 1] if needed <= len(differences) else FEW_FACTOR * deviations[-1]
    return own + middle, float(wide), len(differences)
