"""What a device-hour of each island is worth when all work that is left has to be done: the prices of the work.

They are the dual of "finish everything as early as possible": with them the cheapest island of a job is one where an
optimal division of all work would run it, and the work at these prices, divided by the devices at them, is how long
that takes. What a job costs elsewhere beyond that is what its place there wastes.
"""

from dataclasses import dataclass

import numpy as np

from orchestrator.core.planner.planner_jobs import Floats, Integers, Work

SHARPNESS = 50.0
"""Work goes to its cheapest island, and to one that costs 2 % more at e^-1 of that: steps would swing without it."""

FAR = 1e3
"""What costs so many times the least gets nothing: far beyond what an exponential still tells from that."""

RATE = 0.4
LATER = 0.1
LEAST = 1e-3
SAMPLE = 1024
"""Of more jobs, so many spread evenly stand for all: prices are of their sum."""


@dataclass(frozen=True, slots=True)
class Matching:
    """`price` (islands,) with mean 1 over the devices; `horizon_s`: when all work could end, and no job that is left
    needs longer. `within`: no option counted that ends later than that.
    """

    price: Floats
    horizon_s: float


def match(work: Work, capacity: Integers, warm: Floats, steps: int, *, within: bool = False) -> Matching:
    """The prices at which the work is longest for its devices, from `warm` on. `within`: for a job that would end after
    the horizon on an option this is no option: its whole rest cannot be done there in time.
    """
    stands_for = max(1.0, work.jobs / SAMPLE)
    seen = work.only(np.arange(work.jobs)[:: int(stands_for)]) if work.jobs > SAMPLE else work
    device_s = np.where(seen.possible, seen.devices * seen.remaining_s, np.inf)
    finite_s, scale = _finite(device_s), work.jobs / max(seen.jobs, 1)
    longest_s = float(work.best_s.max(initial=0.0))
    best = Matching(_scaled(warm, capacity), longest_s)
    price, lowest = best.price, 0.0
    for step in range(steps):
        usable = np.where(seen.remaining_s <= best.horizon_s, device_s, np.inf) if within else device_s
        cost = usable * price[seen.island][:, None]
        least = cost.min(axis=0)
        total_s = scale * float(least.sum()) / max(float(price @ capacity), 1e-300)
        if total_s > lowest:
            lowest, best = total_s, Matching(price, max(total_s, longest_s))
        work_s = _finite(usable) if within else finite_s
        price = _moved(price, _load(work_s, cost, least, seen.island, capacity), capacity, step)
    return best


def _finite(seconds: Floats) -> Floats:
    return np.where(np.isfinite(seconds), seconds, 0.0)


def _load(work_s: Floats, cost: Floats, least: Floats, island: Integers, capacity: Integers) -> Floats:
    """(islands,) seconds of work per device when all go where it is cheap."""
    ratio = cost / least
    share = np.minimum(ratio, FAR, out=ratio).astype(np.float32)  # digits enough for a share, and half the time
    np.subtract(1.0, share, out=share)
    share *= SHARPNESS
    np.exp(share, out=share)
    share /= share.sum(axis=0)
    return np.bincount(island, (work_s * share).sum(axis=1), minlength=len(capacity)) / np.maximum(capacity, 1e-9)


def _moved(price: Floats, load: Floats, capacity: Integers, step: int) -> Floats:
    mean = float(load @ capacity) / max(float(capacity.sum()), 1e-9)
    apart = np.clip(load / max(mean, 1e-300) - 1.0, -1.0, 1.0)
    return _scaled(price * np.exp(RATE / (1.0 + LATER * step) * apart), capacity)


def _scaled(price: Floats, capacity: Integers) -> Floats:
    """With mean 1 over the devices, and none worth nothing."""
    floor = np.maximum(price, float(price.max(initial=0.0)) * LEAST)
    return np.asarray(floor * (float(capacity.sum()) / max(float(floor @ capacity), 1e-300)))
