"""Compare the rounds of two measurements: a ratio with an interval, and a verdict only if the data support one.

A round pairs times measured within moments of each other, so a disturbance of the entire round cancels in its ratio.
The rounds are the samples, never single calls, which depend on each other. Intervals and p-values are exact for any
symmetric noise, at any number of rounds: with 9 to 60 rounds, bootstrap intervals are too narrow (in our test they
called 7 % of equal pairs different). Sources: Wilcoxon 1945; Mann and Whitney 1947; Hodges and Lehmann 1963; Holm 1979.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
MIN_EFFECT = 0.02
"""A difference below 2 % counts as none, whatever the interval."""
SAME_WITHIN = 0.05
"""An interval wider than this is never SAME, however noisy the host."""
MIN_COMMON_ROUNDS = 3
"""Minimum number of common rounds for which the times of two measurements are paired."""
Values = NDArray[np.float64]
Block = Mapping[str, Any]
"""A session's result for one block, with the round's number: {"round", "calls", "parts_s", …}."""


class Verdict(StrEnum):
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Reference's time divided by the measurement's: above 1 the latter is faster. `p`: of "equally fast"."""

    ratio: float
    low: float
    high: float
    p: float
    rounds: int

    @property
    def width(self) -> float:
        """Half the width of the interval, relative to the ratio."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf


class Interval(NamedTuple):
    """A median with a confidence interval of at least 95 %, made of order statistics."""

    median: float
    low: float
    high: float


def interval(samples: Sequence[float]) -> Interval:
    """Median and its confidence interval by the binomial distribution, without assumptions on the noise. Fewer than six
    samples cannot give 95 %: their extremes are the bounds."""
    ordered = sorted(map(float, samples))
    count = len(ordered)
    below, cut = 0.0, 0
    while cut < count // 2 and (below := below + math.comb(count, cut) / 2**count) <= (1 - LEVEL) / 2:
        cut += 1
    rank = max(cut - 1, 0)
    return Interval(median(ordered), ordered[rank], ordered[-1 - rank])


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return the interval and the 5th and 95th percentile: {"median", "low", "high", "p5", "p95"}."""
    p5, p95 = (float(q) for q in np.quantile(np.asarray(samples, dtype=float), (0.05, 0.95)))
    return {**interval(samples)._asdict(), "p5": p5, "p95": p95}


def paired(reference: Sequence[float], measurement: Sequence[float]) -> Ratio:
    """Compare two measurements that took turns in the same rounds on one host. Element i of both is from round i.

    Uses the Hodges-Lehmann estimate (the median of the means of all pairs of log ratios), with the interval and p of
    the signed-rank test.
    """
    # A difference of logarithms is exactly antisymmetric.
    logs = np.log(np.asarray(reference, dtype=float)) - np.log(np.asarray(measurement, dtype=float))
    first, second = np.triu_indices(len(logs))
    low, middle, high = _bounds((logs[first] + logs[second]) / 2, signed_rank_counts(tuple(range(1, len(logs) + 1))))
    return Ratio(math.exp(middle), math.exp(low), math.exp(high), wilcoxon(logs), len(logs))


def unpaired(reference: Sequence[float], measurement: Sequence[float]) -> Ratio:
    """Compare measurements on different hosts, whose disturbances are independent.

    Uses the median of all differences of log times, with the interval and p of the Mann-Whitney test.
    """
    a, b = (np.log(np.asarray(side, dtype=float)) for side in (reference, measurement))
    differences = (a[:, None] - b[None, :]).reshape(-1)
    counts = rank_sum_counts(len(a), len(b))
    low, middle, high = _bounds(differences, counts)
    more, fewer = int((differences > 0).sum()), int((differences < 0).sum())
    ties = len(differences) - more - fewer
    smaller = min(more, fewer) + math.ceil(ties / 2)
    return Ratio(math.exp(middle), math.exp(low), math.exp(high), _two_sided(smaller, counts), min(len(a), len(b)))


def _bounds(values: Values, counts: tuple[int, ...]) -> tuple[float, float, float]:
    """Return (low, median, high): the order statistics that a test with these `counts` would not reject."""
    ordered = np.sort(values)
    below, cut, total = 0, 0, sum(counts)
    while cut < len(ordered) // 2 and (below := below + counts[cut]) <= (1 - LEVEL) / 2 * total:
        cut += 1
    low = max(cut - 1, 0)
    return float(ordered[low]), float(np.median(ordered)), float(ordered[-1 - low])


def _two_sided(smaller: int, counts: tuple[int, ...]) -> float:
    return min(1.0, 2 * sum(counts[: smaller + 1]) / sum(counts))


def wilcoxon(logs: Values) -> float:
    """Two-sided p of the signed-rank test. Equal values share the mean of their ranks, and p is still exact."""
    values = logs[logs != 0]
    if not len(values):
        return 1.0
    _, position, counts = np.unique(np.abs(values), return_inverse=True, return_counts=True)
    doubled = (2 * np.cumsum(counts) - counts + 1)[position]
    smaller = int(min(doubled[values > 0].sum(), doubled[values < 0].sum()))
    return _two_sided(smaller, signed_rank_counts(tuple(sorted(doubled.tolist()))))


@cache
def signed_rank_counts(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Count, of all 2^n assignments of signs, those where the positive ranks sum to 0, 1, …."""
    counts = [1] + [0] * sum(ranks)
    for rank in ranks:
        for total in range(len(counts) - 1, rank - 1, -1):
            counts[total] += counts[total - rank]
    return tuple(counts)


@cache
def rank_sum_counts(first: int, second: int) -> tuple[int, ...]:
    """Count the orders of two samples with 0, 1, … inverted pairs: coefficients of the Gaussian binomial."""
    counts = [1] + [0] * (first * second)
    for step in range(1, first + 1):
        for total in range(len(counts) - 1, second + step - 1, -1):
            counts[total] -= counts[total - second - step]
        for total in range(step, len(counts)):
            counts[total] += counts[total - step]
    return tuple(counts)


def holm(p_values: Sequence[float], alpha: float = 1 - LEVEL) -> list[bool]:
    """Holm's correction: return which comparisons are significant if the chance of any error is below `alpha`."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    significant = [False] * len(p_values)
    for position, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - position):
            break
        significant[index] = True
    return significant


def minimum_rounds(comparisons: int) -> int:
    """Rounds needed for the signed-rank test to be able to pass Holm's first step: 2 / 2^n ≤ alpha / m."""
    return max(9, math.ceil(math.log2(2 * max(comparisons, 1) / (1 - LEVEL))))


def verdict(ratio: Ratio, noise: float, holds: bool = True, usable: bool = True) -> Verdict:
    """Decide whether a measurement is faster or slower than the reference.

    `noise` is the difference of an A/A control in the same run (see `control_noise`); `holds`: it is significant after
    Holm's correction. A host that was not `usable` gives INCONCLUSIVE: everything waits there, so differences shrink.
    FASTER and SLOWER need an interval beyond 1 and an effect beyond 2 % and the noise; SAME an interval within 2 %, or
    within the noise where that is below 5 %.
    """
    if not usable:
        return Verdict.INCONCLUSIVE
    least, same = max(MIN_EFFECT, noise), max(MIN_EFFECT, min(noise, SAME_WITHIN))
    beyond = ratio.low > 1 or ratio.high < 1
    if beyond and holds and abs(math.log(ratio.ratio)) > math.log1p(least):
        return Verdict.FASTER if ratio.ratio > 1 else Verdict.SLOWER
    if math.log(ratio.high) <= math.log1p(same) and math.log(ratio.low) >= -math.log1p(same):
        return Verdict.SAME
    return Verdict.INCONCLUSIVE


def call_s(block: Block) -> float:
    """Median seconds per call of a block's parts: the time that users get on this machine."""
    return float(median(block["parts_s"]) / block["calls"])


def fastest_part_s(block: Block) -> float:
    """Seconds per call of the fastest part: other load on a host makes parts slower, never faster."""
    return float(min(block["parts_s"]) / block["calls"])


def by_round(blocks: Iterable[Block]) -> dict[int, float]:
    return {block["round"]: fastest_part_s(block) for block in blocks}


def noise(blocks: Iterable[Block], again: Iterable[Block]) -> float | None:
    """Return the noise of these rounds by their A/A control, or None if there are too few common rounds."""
    first, second = by_round(blocks), by_round(again)
    common = sorted(first.keys() & second.keys())
    if len(common) < MIN_COMMON_ROUNDS:
        return None
    return control_noise(paired([first[n] for n in common], [second[n] for n in common]))


def control_noise(same: Ratio) -> float:
    """Noise by an A/A comparison: the largest distance of its interval from 1."""
    return math.exp(max(abs(math.log(same.low)), abs(math.log(same.high)))) - 1


def is_precise(ratio: Ratio, quiet: bool) -> bool:
    """Return whether more rounds are unnecessary: ±1 % on a quiet host, ±3 % on a shared one."""
    return ratio.width <= (0.01 if quiet else 0.03)
