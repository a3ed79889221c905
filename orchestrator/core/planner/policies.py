"""What a second of each option is worth, by policy: small functions on one mechanism, (options, jobs) of any one unit.

Each reads `Seen`: the work, and what its devices are worth to it. What an option is worth is divided up among jobs by
prices (prices.py), so only ratios count.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from orchestrator.core.planner.island_prices import Matching
from orchestrator.core.planner.planner_jobs import Floats, Work

LENGTH = 0.5
"""How much the length of a job counts for it: at 0 the shortest is first, at 1 all are equal on the same devices."""

TAIL = 0.2
"""How much it counts how long a job will have been there when it ends: what falls is the sum of that time to the power
of 1 + TAIL over all jobs. At 0 that is the mean; more shortens the longest, and the mean grows.
"""

FITNESS = 0.1
"""How much it counts that an option wastes what other work needs more, beyond that the job is slower there."""

ON_TIME = 16.0
"""The same where only the end of the last job counts."""

SLACK = 0.1
"""Of the horizon: a job that can wait so long is worth half of one that cannot wait."""

SHARE = 0.05
"""A job that has got less than this of what it would have alone is as needy as one that got this."""


@dataclass(frozen=True, slots=True)
class Seen:
    """`cost` (options, jobs): the work that is left at the prices of its devices, `least` (jobs,) the lowest of it."""

    work: Work
    matching: Matching
    cost: Floats
    least: Floats

    @property
    def fitness(self) -> Floats:
        """(options, jobs) 1 on the option that wastes nothing, less elsewhere, 0 where the job cannot run."""
        return np.asarray(self.least / self.cost, np.float32)  # a ratio to be raised to a power, three times as fast


Policy = Callable[[Seen], Floats]


def seen_with(work: Work, matching: Matching, price: Floats, *, within: bool = False) -> Seen:
    """`price` (islands,) of a device; `within` the horizon only, where a job has an option that ends by then."""
    seconds = work.remaining_s
    if within:
        late = seconds > matching.horizon_s * (1 + 1e-9)
        seconds = np.where(late & ~late.all(axis=0), np.inf, seconds)
    cost = work.devices * seconds * price[work.island][:, None]
    least = cost.min(axis=0)
    return Seen(work, matching, cost, np.where(np.isfinite(least), least, 1.0))


def finish_time(seen: Seen) -> Floats:
    """Jobs that end soon first, each where it wastes least: the shortest mean time from submission to end."""
    return np.asarray(_soon(seen) * seen.fitness**FITNESS)


def makespan(seen: Seen) -> Floats:
    """The last job ends early: each on devices where it wastes least, those first that can wait least."""
    horizon_s = seen.matching.horizon_s
    slack = np.maximum(1.0 - np.where(np.isfinite(seen.cost), seen.work.remaining_s, 0.0) / horizon_s, 0.0)
    worth = seen.work.devices * seen.matching.price[seen.work.island][:, None]
    return np.asarray(worth * seen.fitness ** (1.0 + ON_TIME) / (slack + SLACK))


def max_min_fairness(seen: Seen) -> Floats:
    """Those first that have got least of what they would have had alone since they were submitted."""
    work = seen.work
    got = np.maximum(work.isolated_s - work.best_s, 0.0) / np.maximum(work.age_s, 1.0)
    return np.asarray(work.devices * (work.best_s / work.remaining_s) / (np.minimum(got, 1.0) + SHARE))


def cost(seen: Seen) -> Floats:
    """As `finish_time`, and where a job costs least money: `seen` has the prices that are paid."""
    return np.asarray(_soon(seen) * seen.fitness**4)


def _soon(seen: Seen) -> Floats:
    """Worth more where the job ends soon, and worth more for a job that will have been there long."""
    stays_s = np.maximum(seen.work.age_s, 0.0) + seen.work.best_s
    return np.asarray(seen.least**LENGTH * stays_s**TAIL / seen.work.remaining_s)


PRICED: dict[str, Policy] = {
    "finish_time": finish_time,
    "max_min_fairness": max_min_fairness,
    "makespan": makespan,
    "cost": cost,
}
IN_ORDER = ("fifo", "priority")
POLICIES = (*IN_ORDER, *PRICED)
DEFAULT = "finish_time"
