"""Input of a decision: running and waiting jobs as columns of arrays."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from orchestrator.core.plan.arrays.machine_memory import Machines

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Truths = NDArray[np.bool_]

WAITS = -1
"""Option number of a job that does not run."""


@dataclass(frozen=True, slots=True)
class Work:
    """Options x jobs. An option is an island and a number of its devices.

    `island` (options,): the island of each option. `devices` and `remaining_s` (options, jobs): number of devices that
    the job uses, and how long it would run from now on without a pause; infinite if it cannot run as this option.
    All others (jobs,): `held` is the option it runs as, or WAITS; `isolated_s` the duration of its complete run alone
    on its best option; `restart_s` the cost of a start or move; `order` that of submission; `priority` the strict tier,
    higher ones first; `weight` its value relative to equal priorities; a `fixed` job keeps what it holds.
    `price_per_hour` (islands,) is of one device. `machines` are those whose memory may be a limit.
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
        """Create with defaults: new, equal jobs that restart without cost, on devices without a price."""
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
        """(options, jobs) True if the job can run as this option."""
        return np.isfinite(self.remaining_s)

    @property
    def best_s(self) -> Floats:
        """(jobs,) remaining seconds on the best option."""
        return np.asarray(self.remaining_s.min(axis=0))

    def fitting(self, capacity: Integers) -> "Work":
        """Return this work without options that need more devices than their island has."""
        too_large = self.devices > capacity[self.island][:, None]
        return replace(self, remaining_s=np.where(too_large, np.inf, self.remaining_s)) if too_large.any() else self

    def only(self, chosen: Truths | Integers) -> "Work":
        """Return this work with these jobs only."""
        per_job = ("held", "age_s", "isolated_s", "restart_s", "order", "priority", "weight", "fixed")
        return replace(
            self,
            devices=self.devices[:, chosen],
            remaining_s=self.remaining_s[:, chosen],
            machines=self.machines and self.machines.only(chosen),
            **{name: getattr(self, name)[chosen] for name in per_job},
        )


class Options(Protocol):
    """`island` (options,) and `devices` (options, jobs) as in `Work`."""

    @property
    def island(self) -> Integers: ...
    @property
    def devices(self) -> Integers: ...


def used(options: Options, option: Integers, islands: int) -> Integers:
    """Return (islands,) the number of devices used if jobs run as `option` (jobs,)."""
    runs = np.flatnonzero(option != WAITS)
    counts = np.bincount(options.island[option[runs]], options.devices[option[runs], runs], minlength=islands)
    return counts.astype(np.int64)
