"""Turn prices into an assignment: greedy, then improved island by island; no job that fits stays waiting."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from orchestrator.core.plan.arrays.knapsack import choose
from orchestrator.core.plan.arrays.machine_memory import Machines, Nodes, Packing
from orchestrator.core.plan.arrays.planner_jobs import WAITS, Floats, Integers, used
from orchestrator.core.plan.arrays.prices import Prices, best_options

SWEEPS = 3

MIN_GAP = 5e-4
"""Fraction of the bound below which the possible gain is too small for improvements."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Input of an assignment.

    `values` and `devices` (options, jobs), the `island` of each option, `capacity` (islands,), and the machines whose
    memory may be a limit.
    """

    values: Floats
    devices: Integers
    island: Integers
    capacity: Integers
    machines: Machines | None = None

    def worth(self, option: Integers) -> float:
        runs = np.flatnonzero(option != WAITS)
        return float(self.values[option[runs], runs].sum())

    def free(self, option: Integers) -> Integers:
        return self.capacity - used(self, option, len(self.capacity))


@dataclass(frozen=True, slots=True)
class Assignment:
    """`option` (jobs,) of each job, or WAITS. `nodes` by job, where machines' memory is a limit."""

    option: Integers
    nodes: Mapping[int, Nodes] = field(default_factory=dict)


def assign(instance: Instance, prices: Prices, sweeps: int = SWEEPS) -> Assignment:
    """Assign jobs within the limits of devices and memory, with no device idle that a job could use."""
    if not instance.values.size:
        return Assignment(np.full(instance.values.shape[1], WAITS))
    best = _fill_free(instance, _greedy(instance, prices))
    worth = instance.worth(best.option)
    for _ in range(sweeps):
        before = worth
        for island in np.flatnonzero(instance.capacity > 0).tolist():
            if worth >= prices.bound * (1 - MIN_GAP):
                return best
            other = _fill_free(instance, _improve(instance, best.option, prices.price, island))
            if (now := instance.worth(other.option)) > worth * (1 + 1e-9):
                best, worth = other, now
        if worth == before:
            break
    return best


def _greedy(instance: Instance, prices: Prices) -> Integers:
    """Assign each job with a gain its best option if that fits, in the order of gain per device."""
    best, gain = prices.option, prices.gain
    buys = np.flatnonzero(gain > 0)
    sizes = instance.devices[best[buys], buys]
    order = np.argsort(-gain[buys] / sizes, kind="stable")
    buys, sizes = buys[order], sizes[order]
    option = np.full(instance.values.shape[1], WAITS)
    for island, size in enumerate(instance.capacity.tolist()):
        on_island = np.flatnonzero(instance.island[best[buys]] == island)
        fits = on_island[_first_fit(sizes[on_island], size)]
        option[buys[fits]] = best[buys[fits]]
    return option


def _first_fit(sizes: Integers, capacity: int) -> Integers:
    """Return the indices chosen by a first-fit pass in order."""
    filled = np.cumsum(sizes)
    first = int(np.searchsorted(filled, capacity, side="right"))
    chosen = list(range(first))
    left = capacity - (int(filled[first - 1]) if first else 0)
    for index in range(first, len(sizes)):
        if not left:
            break
        if sizes[index] <= left:
            left -= int(sizes[index])
            chosen.append(index)
    return np.array(chosen, np.int64)


def _improve(instance: Instance, option: Integers, price: Floats, island: int) -> Integers:
    """Choose the best jobs for one island again; jobs of other islands may move here, else they stay."""
    options = np.flatnonzero(instance.island == island)
    is_here = (option != WAITS) & (instance.island[option] == island)
    value, sizes, best = _best_on_island(instance, options, price)
    elsewhere = np.flatnonzero((option != WAITS) & ~is_here)
    loses = np.zeros(len(option))
    current = option[elsewhere]
    loses[elsewhere] = np.maximum(
        instance.values[current, elsewhere] - instance.devices[current, elsewhere] * price[instance.island[current]],
        0.0,
    )
    gains = value - loses
    jobs = np.flatnonzero((value > 0) & (gains > 0))
    chosen = jobs[choose(int(instance.capacity[island]), sizes[jobs], gains[jobs])]
    updated = np.where(is_here, WAITS, option)
    updated[chosen] = best[chosen]
    return updated


def _best_on_island(instance: Instance, options: Integers, price: Floats) -> tuple[Floats, Integers, Integers]:
    """Return (jobs,) value, devices and number of each job's best option among these options of one island."""
    best, _ = best_options(instance.values[options], instance.devices[options], instance.island[options], price)
    which = options[best]
    jobs = np.arange(instance.values.shape[1])
    return instance.values[which, jobs], instance.devices[which, jobs], which


def _fill_free(instance: Instance, option: Integers) -> Assignment:
    """Fill free devices with waiting jobs, the most valuable first, until no job fits.

    Jobs of `option` for which machines lack memory have to wait, too.
    """
    packing = _pack(instance, option)
    refused = np.zeros(instance.values.shape if packing else (0, 0), np.bool_)
    free = instance.free(option)
    while True:
        has_changed = False
        for index in np.argsort(-free[instance.island], kind="stable").tolist():
            free_count = int(free[instance.island[index]])
            sizes = instance.devices[index]
            if not free_count:
                continue
            is_candidate = (option == WAITS) & (instance.values[index] > 0) & (sizes <= free_count)
            if packing:
                is_candidate &= packing.possible(index) & ~refused[index]
            if len(jobs := np.flatnonzero(is_candidate)):
                chosen = jobs[choose(free_count, sizes[jobs], instance.values[index, jobs])]
                has_changed = has_changed or bool(len(chosen))
                if packing:
                    fits = np.array([packing.add(job, index) for job in chosen.tolist()], np.bool_)
                    refused[index, chosen[~fits]] = True  # it cannot fit later, when less is left
                    chosen = chosen[fits]
                option[chosen] = index
                free[instance.island[index]] -= int(sizes[chosen].sum())
        if not has_changed:
            return Assignment(option, packing.nodes if packing else {})


def _pack(instance: Instance, option: Integers) -> Packing | None:
    """Give jobs nodes in the order of their value per share of the devices or memory, whichever share is larger."""
    if instance.machines is None:
        return None
    packing, runs = Packing(instance.machines, instance), np.flatnonzero(option != WAITS)
    current = option[runs]
    devices = instance.devices[current, runs] / np.maximum(instance.capacity[instance.island[current]], 1)
    size_bytes = instance.machines.nodes[current, runs] * instance.machines.node_bytes[current, runs]
    share = np.maximum(devices, size_bytes / max(float(instance.machines.free_bytes.sum()), 1.0))
    packing.add_all(option, runs[np.argsort(-instance.values[current, runs] / share, kind="stable")].tolist())
    return packing
