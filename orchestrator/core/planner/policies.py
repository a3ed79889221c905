"""Policies: functions that return the value of a second of each option, (options, jobs) in any one unit.

Each reads `PolicyInput`: the work and the prices of its devices. Prices (prices.py) divide the devices among jobs by
these values, so only ratios count.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from orchestrator.core.planner.island_prices import WorkPrices
from orchestrator.core.planner.planner_jobs import Floats, Work

LENGTH = 0.5
"""Weight of a job's length: at 0 the shortest job comes first, at 1 all are equal on the same devices."""

TAIL = 0.2
"""Weight of the time from submission to end: the policy minimises the sum of that time to the power 1 + TAIL.

At 0 that is the mean; larger values shorten the longest times and lengthen the mean.
"""

FITNESS = 0.1
"""Weight of wasting devices that other work needs more, in addition to the job being slower there."""

ON_TIME = 16.0
"""Weight of waste (see FITNESS) if only the end of the last job counts."""

SLACK = 0.1
"""Fraction of the horizon: a job that can wait this long has half the value of one that cannot wait."""

SHARE = 0.05
"""Fraction of its isolated progress below which a job does not become more urgent."""


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """Input of a policy. `cost` (options, jobs): remaining work at the prices of its devices; `least` (jobs,): its
    minimum over the options.
    """

    work: Work
    matching: WorkPrices
    cost: Floats
    least: Floats

    @property
    def fitness(self) -> Floats:
        """(options, jobs) 1 for the option without waste, less for others, 0 if the job cannot run there."""
        return np.asarray(self.least / self.cost, np.float32)  # float32: raising it to a power is three times as fast


Policy = Callable[[PolicyInput], Floats]


def build_input(work: Work, matching: WorkPrices, price: Floats, *, within: bool = False) -> PolicyInput:
    """Build the input of a policy. `price` (islands,) is per device.

    `within`: exclude options that end after the horizon, for jobs that have an option that ends by then.
    """
    seconds = work.remaining_s
    if within:
        is_late = seconds > matching.horizon_s * (1 + 1e-9)
        seconds = np.where(is_late & ~is_late.all(axis=0), np.inf, seconds)
    cost = work.devices * seconds * price[work.island][:, None]
    least = cost.min(axis=0)
    return PolicyInput(work, matching, cost, np.where(np.isfinite(least), least, 1.0))


def finish_time(inputs: PolicyInput) -> Floats:
    """Minimise the mean time from submission to end: jobs that end soon first, each where it wastes least."""
    return np.asarray(_soon(inputs) * inputs.fitness**FITNESS)


def makespan(inputs: PolicyInput) -> Floats:
    """Minimise the end of the last job: jobs that can wait least first, each where it wastes least."""
    horizon_s = inputs.matching.horizon_s
    slack = np.maximum(1.0 - np.where(np.isfinite(inputs.cost), inputs.work.remaining_s, 0.0) / horizon_s, 0.0)
    worth = inputs.work.devices * inputs.matching.price[inputs.work.island][:, None]
    return np.asarray(worth * inputs.fitness ** (1.0 + ON_TIME) / (slack + SLACK))


def max_min_fairness(inputs: PolicyInput) -> Floats:
    """Prefer jobs that have received the smallest part of what they would have had alone since submission."""
    work = inputs.work
    got = np.maximum(work.isolated_s - work.best_s, 0.0) / np.maximum(work.age_s, 1.0)
    return np.asarray(work.devices * (work.best_s / work.remaining_s) / (np.minimum(got, 1.0) + SHARE))


def cost(inputs: PolicyInput) -> Floats:
    """Like `finish_time`, but prefer options that cost least money: `inputs` has the real prices."""
    return np.asarray(_soon(inputs) * inputs.fitness**4)


def _soon(inputs: PolicyInput) -> Floats:
    """Return a higher value where a job ends soon, and for jobs that will have waited long."""
    stays_s = np.maximum(inputs.work.age_s, 0.0) + inputs.work.best_s
    return np.asarray(inputs.least**LENGTH * stays_s**TAIL / inputs.work.remaining_s)


PRICED: dict[str, Policy] = {
    "finish_time": finish_time,
    "max_min_fairness": max_min_fairness,
    "makespan": makespan,
    "cost": cost,
}
ORDER_POLICIES = ("fifo", "priority")
POLICIES = (*ORDER_POLICIES, *PRICED)
DEFAULT = "finish_time"
