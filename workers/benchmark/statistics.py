"""What rounds of two arms say of each other: a ratio with an interval, and a verdict only where it is earned.

Rounds pair what was measured within moments of each other, so what disturbs a whole round drops out of its ratio; the
rounds are what is counted, never single calls, which depend on each other. Intervals and p-values are exact for any
noise that is symmetric, at any number of rounds: with nine to sixty the bootstrap's are too narrow (it called 7 % of
equal arms different, measured). Sources: Wilcoxon 1945; Mann and Whitney 1947; Hodges and Lehmann 1963; Holm 1979.
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
LEAST_EFFECT = 0.02
"""A difference below 2 % is called none, whatever the interval says."""
SAME_WITHIN = 0.05
"""However noisy the host, an interval wider than this is never called the same."""
LEAST_COMMON = 3
"""Rounds of two arms that stand side by side, for their times to be paired."""
Values = NDArray[np.float64]
Block = Mapping[str, Any]
"""What a session answers of one block, with its number: {"round", "calls", "parts_s", …}."""


class Verdict(StrEnum):
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, slots=True)
class Ratio:
    """The reference's time over the arm's: above 1 the arm is faster. `p` is of "they are equally fast"."""

    ratio: float
    low: float
    high: float
    p: float
    rounds: int

    @property
    def width(self) -> float:
        """Half the interval, relative to the ratio."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf


class Interval(NamedTuple):
    """A median with the order statistics that hold it with at least 95 %."""

    median: float
    low: float
    high: float


def interval(samples: Sequence[float]) -> Interval:
    """By the binomial distribution: it needs no assumption on the noise. Fewer than six samples cannot give 95 %: their
    extremes are the bounds."""
    ordered = sorted(map(float, samples))
    count = len(ordered)
    below, cut = 0.0, 0
    while cut < count // 2 and (below := below + math.comb(count, cut) / 2**count) <= (1 - LEVEL) / 2:
        cut += 1
    rank = max(cut - 1, 0)
    return Interval(median(ordered), ordered[rank], ordered[-1 - rank])


def spread(samples: Sequence[float]) -> dict[str, float]:
    """The interval, and the 5th and 95th percentile: {"median", "low", "high", "p5", "p95"}."""
    p5, p95 = (float(q) for q in np.quantile(np.asarray(samples, dtype=float), (0.05, 0.95)))
    return {**interval(samples)._asdict(), "p5": p5, "p95": p95}


def paired(reference: Sequence[float], arm: Sequence[float]) -> Ratio:
    """Of arms that took their turns in the same rounds of one host: times of round i stand side by side.

    Hodges and Lehmann's estimate, the median of the means of all pairs of log ratios, with the interval and p of the
    signed-rank test.
    """
    logs = np.log(np.asarray(reference, dtype=float)) - np.log(np.asarray(arm, dtype=float))  # exactly antisymmetric
    first, second = np.triu_indices(len(logs))
    low, middle, high = _bounds((logs[first] + logs[second]) / 2, signed_rank_counts(tuple(range(1, len(logs) + 1))))
    return Ratio(math.exp(middle), math.exp(low), math.exp(high), wilcoxon(logs), len(logs))


def unpaired(reference: Sequence[float], arm: Sequence[float]) -> Ratio:
    """Of arms on different hosts, where nothing disturbs both alike: the median of all differences of log times, with
    the interval and p of Mann and Whitney's test.
    """
    a, b = (np.log(np.asarray(side, dtype=float)) for side in (reference, arm))
    differences = (a[:, None] - b[None, :]).reshape(-1)
    ways = rank_sum_counts(len(a), len(b))
    low, middle, high = _bounds(differences, ways)
    more, fewer = int((differences > 0).sum()), int((differences < 0).sum())
    ties = len(differences) - more - fewer
    smaller = min(more, fewer) + math.ceil(ties / 2)
    return Ratio(math.exp(middle), math.exp(low), math.exp(high), _two_sided(smaller, ways), min(len(a), len(b)))


def _bounds(values: Values, ways: tuple[int, ...]) -> tuple[float, float, float]:
    """(low, median, high): the order statistics that a test with these `ways` would not reject."""
    ordered = np.sort(values)
    below, cut, total = 0, 0, sum(ways)
    while cut < len(ordered) // 2 and (below := below + ways[cut]) <= (1 - LEVEL) / 2 * total:
        cut += 1
    low = max(cut - 1, 0)
    return float(ordered[low]), float(np.median(ordered)), float(ordered[-1 - low])


def _two_sided(smaller: int, ways: tuple[int, ...]) -> float:
    return min(1.0, 2 * sum(ways[: smaller + 1]) / sum(ways))


def wilcoxon(logs: Values) -> float:
    """The signed-rank test's two-sided p. Equal values share the mean of their ranks, and the p stays exact."""
    values = logs[logs != 0]
    if not len(values):
        return 1.0
    _, place, counts = np.unique(np.abs(values), return_inverse=True, return_counts=True)
    doubled = (2 * np.cumsum(counts) - counts + 1)[place]
    smaller = int(min(doubled[values > 0].sum(), doubled[values < 0].sum()))
    return _two_sided(smaller, signed_rank_counts(tuple(sorted(doubled.tolist()))))


@cache
def signed_rank_counts(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """In how many of the 2^n ways of signs the ranks of the positive ones sum to 0, 1, …."""
    ways = [1] + [0] * sum(ranks)
    for rank in ranks:
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    return tuple(ways)


@cache
def rank_sum_counts(first: int, second: int) -> tuple[int, ...]:
    """In how many orders of two samples 0, 1, … pairs are the other way round: the Gaussian binomial's coefficients."""
    ways = [1] + [0] * (first * second)
    for step in range(1, first + 1):
        for total in range(len(ways) - 1, second + step - 1, -1):
            ways[total] -= ways[total - second - step]
        for total in range(step, len(ways)):
            ways[total] += ways[total - step]
    return tuple(ways)


def holm(p_values: Sequence[float], alpha: float = 1 - LEVEL) -> list[bool]:
    """Which of many comparisons hold together: the chance that any of them is wrong stays below `alpha`."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    held = [False] * len(p_values)
    for place, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - place):
            break
        held[index] = True
    return held


def minimum_rounds(comparisons: int) -> int:
    """So many that the signed-rank test can pass Holm's first step at all: 2 / 2^n ≤ alpha / m."""
    return max(9, math.ceil(math.log2(2 * max(comparisons, 1) / (1 - LEVEL))))


def verdict(found: Ratio, noise: float, holds: bool = True, usable: bool = True) -> Verdict:
    """`noise` is how far this host told an arm from itself in the same run (see `noise_of`), `holds` Holm's word.

    On a host that was not `usable` nothing is said: there everything waits alike, so that differences shrink.
    FASTER and SLOWER need an interval beyond 1 and an effect beyond 2 % and the noise; SAME an interval within 2 %, or
    within the noise where that is below 5 %.
    """
    if not usable:
        return Verdict.INCONCLUSIVE
    least, same = max(LEAST_EFFECT, noise), max(LEAST_EFFECT, min(noise, SAME_WITHIN))
    beyond = found.low > 1 or found.high < 1
    if beyond and holds and abs(math.log(found.ratio)) > math.log1p(least):
        return Verdict.FASTER if found.ratio > 1 else Verdict.SLOWER
    if math.log(found.high) <= math.log1p(same) and math.log(found.low) >= -math.log1p(same):
        return Verdict.SAME
    return Verdict.INCONCLUSIVE


def call_s(block: Block) -> float:
    """Seconds per call of the middle of its parts: what one gets on this machine."""
    return float(median(block["parts_s"]) / block["calls"])


def fastest_part_s(block: Block) -> float:
    """Seconds per call of the quickest part: what else runs on a host makes parts slower, never quicker."""
    return float(min(block["parts_s"]) / block["calls"])


def by_round(blocks: Iterable[Block]) -> dict[int, float]:
    return {block["round"]: fastest_part_s(block) for block in blocks}


def noise(blocks: Iterable[Block], again: Iterable[Block]) -> float | None:
    """How far this host told the same from the same in these rounds; None for an arm that had no twin."""
    first, second = by_round(blocks), by_round(again)
    common = sorted(first.keys() & second.keys())
    if len(common) < LEAST_COMMON:
        return None
    return control_noise(paired([first[n] for n in common], [second[n] for n in common]))


def control_noise(same: Ratio) -> float:
    """From an A/A comparison: the farthest its interval goes from 1."""
    return math.exp(max(abs(math.log(same.low)), abs(math.log(same.high)))) - 1


def is_precise(found: Ratio, quiet: bool) -> bool:
    """Whether more rounds would only be a waste: ±1 % on a quiet host, ±3 % on a shared one."""
    return found.width <= (0.01 if quiet else 0.03)
