"""From prices to whole jobs on whole devices: greedy, repaired island by island, with nothing left idle that fits."""

from dataclasses import dataclass

import numpy as np

from orchestrator.core.planner.knapsack import choose
from orchestrator.core.planner.prices import Prices, best_options
from orchestrator.core.planner.work import WAITS, Floats, Integers, used

SWEEPS = 3

GAP = 5e-4
"""Of the bound: where less is left to gain, nothing is repaired."""


@dataclass(frozen=True, slots=True)
class Instance:
    """What is assigned: `values` and `devices` (options, jobs), the `island` of each option, `capacity` (islands,)."""

    values: Floats
    devices: Integers
    island: Integers
    capacity: Integers

    def worth(self, option: Integers) -> float:
        runs = np.flatnonzero(option != WAITS)
        return float(self.values[option[runs], runs].sum())

    def free(self, option: Integers) -> Integers:
        return self.capacity - used(self, option, len(self.capacity))


def assign(instance: Instance, prices: Prices, sweeps: int = SWEEPS) -> Integers:
    """(jobs,) the option of each job, or WAITS. Never more devices than there are; no device idle that a job fits."""
    if not instance.values.size:
        return np.full(instance.values.shape[1], WAITS)
    option = _filled(instance, _greedy(instance, prices))
    worth = instance.worth(option)
    for _ in range(sweeps):
        before = worth
        for island in np.flatnonzero(instance.capacity > 0).tolist():
            if worth >= prices.bound * (1 - GAP):
                return option
            other = _filled(instance, _chosen_again(instance, option, prices.price, island))
            if (now := instance.worth(other)) > worth * (1 + 1e-9):
                option, worth = other, now
        if worth == before:
            break
    return option


def _greedy(instance: Instance, prices: Prices) -> Integers:
    """Jobs that gain something, those first that gain most per device, each as its best option while that fits."""
    best, gain = prices.option, prices.gain
    buys = np.flatnonzero(gain > 0)
    sizes = instance.devices[best[buys], buys]
    order = np.argsort(-gain[buys] / sizes, kind="stable")
    buys, sizes = buys[order], sizes[order]
    option = np.full(instance.values.shape[1], WAITS)
    for island, room in enumerate(instance.capacity.tolist()):
        here = np.flatnonzero(instance.island[best[buys]] == island)
        fits = here[_in_turn(sizes[here], room)]
        option[buys[fits]] = best[buys[fits]]
    return option


def _in_turn(sizes: Integers, room: int) -> Integers:
    """Indices of what is taken when each is taken that still fits, in order."""
    filled = np.cumsum(sizes)
    first = int(np.searchsorted(filled, room, side="right"))
    taken = list(range(first))
    left = room - (int(filled[first - 1]) if first else 0)
    for index in range(first, len(sizes)):
        if not left:
            break
        if sizes[index] <= left:
            left -= int(sizes[index])
            taken.append(index)
    return np.array(taken, np.int64)


def _chosen_again(instance: Instance, option: Integers, price: Floats, island: int) -> Integers:
    """The best jobs for this one island, while those of the others stay where they are unless they come here."""
    options = np.flatnonzero(instance.island == island)
    here = (option != WAITS) & (instance.island[option] == island)
    value, sizes, best = _on(instance, options, price)
    there = np.flatnonzero((option != WAITS) & ~here)
    loses = np.zeros(len(option))
    held = option[there]
    loses[there] = np.maximum(
        instance.values[held, there] - instance.devices[held, there] * price[instance.island[held]], 0.0
    )
    gains = value - loses
    jobs = np.flatnonzero((value > 0) & (gains > 0))
    taken = jobs[choose(int(instance.capacity[island]), sizes[jobs], gains[jobs])]
    fresh = np.where(here, WAITS, option)
    fresh[taken] = best[taken]
    return fresh


def _on(instance: Instance, options: Integers, price: Floats) -> tuple[Floats, Integers, Integers]:
    """(jobs,) of the best of these options of one island: its value, its devices, and which it is."""
    best, _ = best_options(instance.values[options], instance.devices[options], instance.island[options], price)
    which = options[best]
    jobs = np.arange(instance.values.shape[1])
    return instance.values[which, jobs], instance.devices[which, jobs], which


def _filled(instance: Instance, option: Integers) -> Integers:
    """With jobs that wait on what is free: those worth most there, and in the end any that fit."""
    free = instance.free(option)
    while True:
        found = False
        for index in np.argsort(-free[instance.island], kind="stable").tolist():
            room = int(free[instance.island[index]])
            sizes = instance.devices[index]
            jobs = np.flatnonzero((option == WAITS) & (instance.values[index] > 0) & (sizes <= room)) if room else ()
            if len(jobs):
                taken = jobs[choose(room, sizes[jobs], instance.values[index, jobs])]
                option[taken] = index
                free[instance.island[index]] -= int(sizes[taken].sum())
                found = found or bool(len(taken))
        if not found:
            return option
