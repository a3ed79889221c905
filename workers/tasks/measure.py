"""All timing of the package: host clock round one call, closed by a forced synchronisation of the back end."""

import statistics
from collections.abc import Callable, Sequence
from math import comb
from time import perf_counter
from typing import Any, NamedTuple

from workers.backends.base import BaseBackend
from workers.optimizers.comparing import first_tensor

LEVEL = 0.95


class Timing(NamedTuple):
    """Seconds of every call in order; the first, which may compile, apart. `output` is what the last call returned."""

    first_call_s: float
    samples_s: list[float]
    output: Any


def measure(call: Callable[[], Any], backend: BaseBackend, warmup: int, rounds: int) -> Timing:
    """One first call, `warmup` more, then `rounds` that count.

    A result is held until the device is done, since a lazy device never computes what nobody holds, and the last one is
    read, so that nothing can be left out.
    """
    first_call_s, output = _timed(call, backend)
    for _ in range(warmup):
        _, output = _timed(call, backend)
    samples_s = []
    for _ in range(rounds):
        elapsed_s, output = _timed(call, backend)
        samples_s.append(elapsed_s)
    first_tensor(output).detach().cpu()
    return Timing(first_call_s, samples_s, output)


def _timed(call: Callable[[], Any], backend: BaseBackend) -> tuple[float, Any]:
    backend.synchronize()
    start = perf_counter()
    output = call()
    backend.synchronize()
    return perf_counter() - start, output


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): order statistics that hold the true median with at least 95 %, by the binomial distribution.

    Needs no assumption on the shape of the noise. Fewer than six samples cannot give 95 %: their extremes are returned.
    """
    ordered = sorted(samples)
    n = len(ordered)
    below, cut = 0.0, 0
    while cut < n // 2 and (below := below + comb(n, cut) / 2**n) <= (1 - LEVEL) / 2:
        cut += 1
    low = max(cut - 1, 0)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def row(case: str, timing: Timing, items: int) -> dict[str, Any]:
    """One line of a benchmark's result; `items` are processed by one call."""
    median_s, low_s, high_s = median_interval(timing.samples_s)
    return {
        "case": case,
        "median_s": median_s,
        "ci_low_s": low_s,
        "ci_high_s": high_s,
        "samples_s": timing.samples_s,
        "first_call_s": timing.first_call_s,
        "items_per_s": items / median_s,
    }
