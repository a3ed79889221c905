"""Price the devices of each island so that the jobs' demand equals the supply.

At fixed prices every job chooses its best option by itself, so the decision separates into one choice per job. The
prices give an upper bound for any assignment (Lagrangian duality): the cost of all devices plus what the jobs gain
beyond it. The gap between bound and value is the certificate of a decision.
"""

from dataclasses import dataclass

import numpy as np

from orchestrator.core.plan.arrays.planner_jobs import Floats, Integers, Truths

RATE = 0.5
RATE_DECAY = 0.15
"""A price changes by a factor of up to exp(RATE) in the first step and by less in each later one."""

PATIENCE = 5
"""Steps without a lower bound after which a search from warm prices stops, because it has converged.

A small gap is not a reason to stop: long jobs are such a small part of the sum that they were moved 25 % more often
when steps ended at a gap of 0.05 %.
"""

MIN_PRICE_SHARE = 1e-6
"""Fraction of the highest value per device that is the minimum price, so that a fallen price can grow again."""


MANY, NEAR = 4096, 0.8
"""With more than MANY jobs, those that would not buy even at NEAR of the price are left out until the end."""


@dataclass(frozen=True, slots=True)
class Prices:
    """`price` (islands,) of one device in units of value; `bound`: upper bound for the value of any assignment.

    `option` and `gain` (jobs,): what each job would choose at these prices, and its gain beyond them.
    """

    price: Floats
    bound: float
    option: Integers
    gain: Floats


def find_prices(
    values: Floats, counts: Integers, island: Integers, capacity: Integers, warm: Floats, steps: int
) -> Prices:
    """Return the lowest bound of up to `steps` > 0 steps from the prices `warm`.

    `values` and `counts` (devices) are (options, jobs).
    """
    devices = counts.astype(np.float64)  # convert once, not in each step
    sample = slice(None, None, 1 + values.shape[1] // MANY)  # only scales the steps, the bound does not depend on it
    highest = float((values[:, sample] / devices[:, sample]).max(initial=0.0)) or float(values.max(initial=0.0))
    if not highest:
        jobs = values.shape[1]
        return Prices(np.zeros(len(capacity)), 0.0, np.zeros(jobs, np.int64), np.zeros(jobs))
    price = np.where((warm > 0) & (warm <= highest), warm, highest / 2)
    patience = PATIENCE if (warm > 0).any() else steps
    if values.shape[1] <= MANY:
        return _steps(values, devices, island, capacity, price, highest, steps, patience)
    near = _would_buy(values, devices, price[island] * NEAR)
    cleared = _steps(values[:, near], devices[:, near], island, capacity, price, highest, steps, patience)
    if (cleared.price >= price * NEAR).all():  # then no other job buys
        option, gain = np.zeros(values.shape[1], np.int64), np.zeros(values.shape[1])
        option[near], gain[near] = cleared.option, cleared.gain
        return Prices(cleared.price, cleared.bound, option, gain)
    option, gain = best_options(values, devices, island, cleared.price)
    return Prices(cleared.price, float(cleared.price @ capacity + gain[gain > 0].sum()), option, gain)


def _would_buy(values: Floats, devices: Floats, price: Floats) -> Truths:
    """Return (jobs,) True if any option is worth more than it costs; `price` is (options,)."""
    buys = np.zeros(values.shape[1], np.bool_)
    for index in range(len(price)):
        buys |= values[index] > devices[index] * price[index]
    return buys


def _steps(
    values: Floats,
    devices: Floats,
    island: Integers,
    capacity: Integers,
    price: Floats,
    highest: float,
    steps: int,
    patience: int,
) -> Prices:
    supply = np.maximum(capacity, 1e-9)
    best: Prices | None = None
    best_step = 0
    for step in range(steps):
        option, gain = best_options(values, devices, island, price)
        buys = np.flatnonzero(gain > 0)
        requested = np.bincount(island[option[buys]], devices[option[buys], buys], minlength=len(capacity))
        bound = float(price @ capacity + gain[buys].sum())
        if best is None or bound < best.bound:
            best, best_step = Prices(price, bound, option, gain), step
        if step - best_step >= patience:
            break
        change = np.clip(requested / supply - 1.0, -1.0, 1.5) * RATE / (1.0 + RATE_DECAY * step)
        price = np.maximum(price, highest * MIN_PRICE_SHARE) * np.exp(change)
    assert best is not None
    return best


def best_options(
    values: Floats, devices: Floats | Integers, island: Integers, price: Floats
) -> tuple[Integers, Floats]:
    """Return (jobs,) the option of each job that gains most beyond its price, and that gain."""
    gain = values[0] - devices[0] * price[island[0]]
    option, which = np.zeros((2, len(gain)), np.int16)
    other, is_better = np.empty_like(gain), np.empty(len(gain), np.bool_)
    for index, unit_price in enumerate(price[island[1:]].tolist(), 1):  # faster than argmax over the first axis
        np.multiply(devices[index], unit_price, out=other)
        np.subtract(values[index], other, out=other)
        np.greater(other, gain, out=is_better)
        np.maximum(gain, other, out=gain)
        np.multiply(is_better, np.int16(index), out=which)  # a later index is greater: faster than a masked copy
        np.maximum(option, which, out=option)
    return option.astype(np.int64), gain
