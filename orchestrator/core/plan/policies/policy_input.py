"""What a policy reads: the work, and its cost at the prices of devices."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from orchestrator.core.plan.arrays.island_prices import WorkPrices
from orchestrator.core.plan.arrays.planner_jobs import Floats, Work


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
