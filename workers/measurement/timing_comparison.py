"""Compare the times of two implementations, measured alternately so that noise affects both equally."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.measurement.inputs import Inputs
from workers.measurement.statistics import Interval, interval
from workers.measurement.timing import Timer

ROUNDS, WARMUP = 12, 2
MIN_ROUND_S, MAX_ROUND_S = 2e-3, 50e-3


@dataclass(frozen=True, slots=True)
class TimingComparison:
    """`ratio` is the first's time divided by the second's, per round: above 1 the second is faster."""

    first_s: Interval
    second_s: Interval
    ratio: Interval

    @property
    def slower(self) -> bool:
        """Return whether the second is slower beyond noise: even the upper bound of its speed-up is below 1."""
        return self.ratio.high < 1


def compare_timings(
    first: Callable[[], Any],
    second: Callable[[], Any],
    timer: Timer,
    rounds: int = ROUNDS,
    inputs: Inputs | None = None,
) -> TimingComparison:
    """Time both alternately with the clock of `timer`'s device.

    Odd rounds start with the second, so that neither always warms up the caches for the other. `inputs` supplies the
    inputs that calls of both consume.
    """
    both, refill = (first, second), inputs.refill if inputs else None
    calls = _calls_per_round(*(min(timer.block(call, 1, refill=refill).call_s for _ in range(WARMUP)) for call in both))
    calls = min(calls, inputs.max_calls) if inputs and inputs.changed else calls
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            times[which].append(timer.block(both[which], calls, refill=refill).call_s)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return TimingComparison(interval(times[0]), interval(times[1]), interval(ratios))


def _calls_per_round(first_s: float, second_s: float) -> int:
    """Calls per round: enough that the faster takes 2 ms, so that one wake-up of another process does not dominate, but
    few enough that the slower takes at most 50 ms.
    """
    return max(
        1, min(math.ceil(MIN_ROUND_S / max(min(first_s, second_s), 1e-7)), int(MAX_ROUND_S / max(first_s, second_s)))
    )
