"""What a decision is made from: jobs that run or wait, as columns."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from orchestrator.core.planner.packing import Machines

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Truths = NDArray[np.bool_]

WAITS = -1
"""The option of a job that does not run."""


@dataclass(frozen=True, slots=True)
class Work:
    """Options x jobs. An option is an island and how many of its devices a job takes there.

    `island` (options,): the island of each option. `devices` and `remaining_s` (options, jobs): how many devices the
    job takes, and how long it would run from now on without a pause; infinite where it cannot run so. All others
    (jobs,): `held` is the option it runs as, or WAITS; `isolated_s` its whole run alone on its best option; `restart_s`
    what a start or a move costs; `order` of submission; `priority` of strict tiers, higher ones first; `weight` of its
    value among equals; a `fixed` job keeps what it holds. `price_per_hour` (islands,) is of one device. `machines` are
    those of which the memory may run out.
    """

    island: Integers
    devices: Integers
    remaining_s: Floats
    held: Integers
    age_s: Floats
    isolated_s: Floats
    restart_s: Floats
    order: Integers
    priority: Integers
    weight: Floats
    fixed: Truths
    price_per_hour: Floats
    machines: "Machines | None" = None

    @classmethod
    def of(
        cls,
        island: Integers,
        devices: Integers,
        remaining_s: Floats,
        held: Integers,
        *,
        age_s: Floats | None = None,
        isolated_s: Floats | None = None,
        restart_s: Floats | None = None,
        order: Integers | None = None,
        priority: Integers | None = None,
        weight: Floats | None = None,
        fixed: Truths | None = None,
        price_per_hour: Floats | None = None,
    ) -> "Work":
        """With what is not said: new, equal jobs that restart for nothing, on devices that cost nothing."""
        jobs = len(held)
        best_s = remaining_s.min(axis=0) if remaining_s.size else np.zeros(jobs)
        return cls(
            island,
            devices,
            np.maximum(remaining_s, 1.0),  # a job about to end would outweigh all others
            held,
            np.zeros(jobs) if age_s is None else age_s,
            best_s if isolated_s is None else isolated_s,
            np.zeros(jobs) if restart_s is None else restart_s,
            np.arange(jobs) if order is None else order,
            np.zeros(jobs, np.int64) if priority is None else priority,
            np.ones(jobs) if weight is None else weight,
            np.zeros(jobs, np.bool_) if fixed is None else fixed,
            np.zeros(int(island.max(initial=-1)) + 1) if price_per_hour is None else price_per_hour,
        )

    @property
    def jobs(self) -> int:
        return len(self.held)

    @property
    def possible(self) -> Truths:
        """(options, jobs)"""
        return np.isfinite(self.remaining_s)

    @property
    def best_s(self) -> Floats:
        """(jobs,) on the best option."""
        return np.asarray(self.remaining_s.min(axis=0))

    def fitting(self, capacity: Integers) -> "Work":
        """Without options that take more devices than their island has."""
        too_large = self.devices > capacity[self.island][:, None]
        return replace(self, remaining_s=np.where(too_large, np.inf, self.remaining_s)) if too_large.any() else self

    def only(self, chosen: Truths | Integers) -> "Work":
        """These jobs alone."""
        columns = ("held", "age_s", "isolated_s", "restart_s", "order", "priority", "weight", "fixed")
        return replace(
            self,
            devices=self.devices[:, chosen],
            remaining_s=self.remaining_s[:, chosen],
            machines=self.machines and self.machines.only(chosen),
            **{name: getattr(self, name)[chosen] for name in columns},
        )


class Options(Protocol):
    """`island` (options,) and `devices` (options, jobs), as `Work` has them."""

    @property
    def island(self) -> Integers: ...
    @property
    def devices(self) -> Integers: ...


def used(options: Options, option: Integers, islands: int) -> Integers:
    """(islands,) how many devices jobs hold that run as `option` (jobs,) says."""
    runs = np.flatnonzero(option != WAITS)
    counts = np.bincount(options.island[option[runs]], options.devices[option[runs], runs], minlength=islands)
    return counts.astype(np.int64)
