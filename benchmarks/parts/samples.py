"""Seconds by case, cases measured in turn, and what may be said of the numbers."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from workers.measurement.statistics import interval

FEWEST = 6
"""Fewer samples than this cannot give an interval of 95 %."""


class Samples:
    """Every sample is kept, in the order it was taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def add(self, case: str, seconds: float) -> None:
        self._seconds[case].append(seconds)

    def clear(self) -> None:
        self._seconds.clear()

    @contextmanager
    def timing(self, case: str) -> Iterator[None]:
        """An error inside leaves no sample."""
        start = perf_counter()
        yield
        self.add(case, perf_counter() - start)

    def __contains__(self, case: str) -> bool:
        return case in self._seconds

    def row(self, case: str) -> dict[str, Any]:
        """Of fewer than FEWEST samples the interval is their range."""
        samples_s = self._seconds[case]
        median_s, low_s, high_s = interval(samples_s)
        told = {"median_s": median_s, "low_s": low_s, "high_s": high_s, "min_s": min(samples_s)}
        return {"case": case, "n": len(samples_s), **told, "samples_s": [round(s, 7) for s in samples_s]}


def in_turn(cases: Sequence[Callable[[], None]], rounds: int, progress: Callable[[str], None], what: str) -> None:
    """Every round runs each case once and starts with another one: what drifts on the machine meets all alike."""
    for number in range(rounds):
        progress(f"{what}: round {number + 1} of {rounds}")
        first = number % len(cases)
        for case in (*cases[first:], *cases[:first]):
            case()


def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """`ratio` 2: ours takes half their time. Its interval combines both, so it is wider than 95 %."""
    few = min(ours["n"], theirs["n"]) < FEWEST
    low, high = theirs["low_s"] / ours["high_s"], theirs["high_s"] / ours["low_s"]
    verdict = "too few samples" if few else "ahead" if low > 1 else "behind" if high < 1 else "inconclusive"
    return {
        "ours": ours["case"], "theirs": theirs["case"], "ratio": theirs["median_s"] / ours["median_s"], "low": low,
        "high": high, "verdict": verdict,
    }  # fmt: skip


def over_limit(ours: dict[str, Any], limit: dict[str, Any]) -> dict[str, Any]:
    """`times` 3: ours takes as long as three of what the machine cannot do faster."""
    return {"ours": ours["case"], "limit": limit["case"], "times": ours["median_s"] / limit["median_s"]}
