"""Price a device-hour of each island for the task of finishing all remaining work: the prices of the work.

They are the dual of "finish everything as early as possible". An optimal division of all work runs each job on its
cheapest island at these prices, and takes the priced work divided by the priced devices. The additional cost of a job
on another island is what its place there wastes.
"""

from dataclasses import dataclass

import numpy as np

from orchestrator.core.plan.arrays.planner_jobs import Floats, Integers, Work

SHARPNESS = 50.0
"""Sharpness of the split: an island that costs 2 % more gets e^-1 of the share. Without it steps would oscillate."""

MAX_COST_RATIO = 1e3
"""Cost ratio at which a share is 0, far beyond what the exponential distinguishes."""

RATE = 0.4
RATE_DECAY = 0.1
MIN_PRICE_SHARE = 1e-3
SAMPLE = 1024
"""Maximum number of jobs from which prices are computed; of more, an evenly spread sample is used."""


@dataclass(frozen=True, slots=True)
class WorkPrices:
    """`price` (islands,) has mean 1 over the devices. `horizon_s`: when all work could end; no job needs longer."""

    price: Floats
    horizon_s: float


def price_work(work: Work, capacity: Integers, warm: Floats, steps: int, *, within: bool = False) -> WorkPrices:
    """Find the prices at which the work takes longest for its devices, starting from `warm`.

    `within`: ignore options on which a job would end after the horizon.
    """
    sample_ratio = max(1.0, work.jobs / SAMPLE)
    sample = work.only(np.arange(work.jobs)[:: int(sample_ratio)]) if work.jobs > SAMPLE else work
    device_s = np.where(sample.possible, sample.devices * sample.remaining_s, np.inf)
    finite_s, scale = _finite(device_s), work.jobs / max(sample.jobs, 1)
    longest_s = float(work.best_s.max(initial=0.0))
    best = WorkPrices(_normalize(warm, capacity), longest_s)
    price, lowest = best.price, 0.0
    for step in range(steps):
        usable = np.where(sample.remaining_s <= best.horizon_s, device_s, np.inf) if within else device_s
        cost = usable * price[sample.island][:, None]
        least = cost.min(axis=0)
        total_s = scale * float(least.sum()) / max(float(price @ capacity), 1e-300)
        if total_s > lowest:
            lowest, best = total_s, WorkPrices(price, max(total_s, longest_s))
        work_s = _finite(usable) if within else finite_s
        price = _step_price(price, _load(work_s, cost, least, sample.island, capacity), capacity, step)
    return best


def _finite(seconds: Floats) -> Floats:
    return np.where(np.isfinite(seconds), seconds, 0.0)


def _load(work_s: Floats, cost: Floats, least: Floats, island: Integers, capacity: Integers) -> Floats:
    """Return (islands,) the seconds of work per device if all jobs go to cheap islands."""
    ratio = cost / least
    share = np.minimum(ratio, MAX_COST_RATIO, out=ratio).astype(
        np.float32
    )  # precise enough for a share, and twice as fast
    np.subtract(1.0, share, out=share)
    share *= SHARPNESS
    np.exp(share, out=share)
    share /= share.sum(axis=0)
    return np.bincount(island, (work_s * share).sum(axis=1), minlength=len(capacity)) / np.maximum(capacity, 1e-9)


def _step_price(price: Floats, load: Floats, capacity: Integers, step: int) -> Floats:
    mean = float(load @ capacity) / max(float(capacity.sum()), 1e-9)
    deviation = np.clip(load / max(mean, 1e-300) - 1.0, -1.0, 1.0)
    return _normalize(price * np.exp(RATE / (1.0 + RATE_DECAY * step) * deviation), capacity)


def _normalize(price: Floats, capacity: Integers) -> Floats:
    """Scale prices to mean 1 over the devices, with a positive minimum."""
    floor = np.maximum(price, float(price.max(initial=0.0)) * MIN_PRICE_SHARE)
    return np.asarray(floor * (float(capacity.sum()) / max(float(floor @ capacity), 1e-300)))
