"""What a device of each island is worth to the jobs that want it: prices at which they want as many as there are.

With a price for each island every job takes what is best for itself, so that a decision over all jobs falls apart into
one look at each. The prices bound what any assignment can reach (Lagrangian duality): the sum of what the devices cost
and of what the jobs gain beyond it. The gap between the two is the certificate of a decision.
"""

from dataclasses import dataclass

import numpy as np

from orchestrator.core.planner.planner_jobs import Floats, Integers, Truths

RATE = 0.5
LATER = 0.15
"""A price moves by up to exp(RATE) at the first step and by less at each later one."""

PATIENCE = 5
"""From prices that were warm no more steps are made after so many without a lower bound: they have arrived by then.
That the bound is nearly reached is no reason to stop: what long jobs are worth is so little of the sum that they were
moved a quarter more often where steps ended at a gap of 0.05 %.
"""

LEAST = 1e-6
"""Of the highest value per device: a price that has fallen below grows from here again."""


MANY, NEAR = 4096, 0.8
"""Of more jobs, those that would not buy at this part of the price either are left out until the end."""


@dataclass(frozen=True, slots=True)
class Prices:
    """`price` (islands,) of one device in units of value; `bound`: no assignment is worth more. `option` and `gain`
    (jobs,) are what each job would take at these prices, and what it would gain beyond them.
    """

    price: Floats
    bound: float
    option: Integers
    gain: Floats


def clear(values: Floats, counts: Integers, island: Integers, capacity: Integers, warm: Floats, steps: int) -> Prices:
    """The lowest bound that up to `steps` > 0 steps from the prices `warm` find. `values` and
    `counts` of devices are (options, jobs).
    """
    devices = counts.astype(np.float64)  # once, and not at each step
    some = slice(None, None, 1 + values.shape[1] // MANY)  # a scale for steps: no bound depends on it
    highest = float((values[:, some] / devices[:, some]).max(initial=0.0)) or float(values.max(initial=0.0))
    if not highest:
        jobs = values.shape[1]
        return Prices(np.zeros(len(capacity)), 0.0, np.zeros(jobs, np.int64), np.zeros(jobs))
    price = np.where((warm > 0) & (warm <= highest), warm, highest / 2)
    patience = PATIENCE if (warm > 0).any() else steps
    if values.shape[1] <= MANY:
        return _steps(values, devices, island, capacity, price, highest, steps, patience)
    near = _would_buy(values, devices, price[island] * NEAR)
    found = _steps(values[:, near], devices[:, near], island, capacity, price, highest, steps, patience)
    if (found.price >= price * NEAR).all():  # then nobody else buys
        option, gain = np.zeros(values.shape[1], np.int64), np.zeros(values.shape[1])
        option[near], gain[near] = found.option, found.gain
        return Prices(found.price, found.bound, option, gain)
    option, gain = best_options(values, devices, island, found.price)
    return Prices(found.price, float(found.price @ capacity + gain[gain > 0].sum()), option, gain)


def _would_buy(values: Floats, devices: Floats, price: Floats) -> Truths:
    """(jobs,) whether any option is worth more than it costs; `price` (options,)."""
    found = np.zeros(values.shape[1], np.bool_)
    for index in range(len(price)):
        found |= values[index] > devices[index] * price[index]
    return found


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
    room = np.maximum(capacity, 1e-9)
    best: Prices | None = None
    best_step = 0
    for step in range(steps):
        option, gain = best_options(values, devices, island, price)
        buys = np.flatnonzero(gain > 0)
        wanted = np.bincount(island[option[buys]], devices[option[buys], buys], minlength=len(capacity))
        bound = float(price @ capacity + gain[buys].sum())
        if best is None or bound < best.bound:
            best, best_step = Prices(price, bound, option, gain), step
        if step - best_step >= patience:
            break
        moved = np.clip(wanted / room - 1.0, -1.0, 1.5) * RATE / (1.0 + LATER * step)
        price = np.maximum(price, highest * LEAST) * np.exp(moved)
    assert best is not None
    return best


def best_options(
    values: Floats, devices: Floats | Integers, island: Integers, price: Floats
) -> tuple[Integers, Floats]:
    """(jobs,) of each job the option that gains most beyond its price, and that gain."""
    gain = values[0] - devices[0] * price[island[0]]
    option, which = np.zeros((2, len(gain)), np.int16)
    other, more = np.empty_like(gain), np.empty(len(gain), np.bool_)
    for index, paid in enumerate(price[island[1:]].tolist(), 1):  # faster than argmax over the first axis
        np.multiply(devices[index], paid, out=other)
        np.subtract(values[index], other, out=other)
        np.greater(other, gain, out=more)
        np.maximum(gain, other, out=gain)
        np.multiply(more, np.int16(index), out=which)  # a later index is greater: faster than a copy where `more`
        np.maximum(option, which, out=option)
    return option.astype(np.int64), gain
