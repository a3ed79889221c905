"""From prices to whole jobs on whole devices: greedy, repaired island by island, with nothing left idle that fits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from orchestrator.core.planner.knapsack import choose
from orchestrator.core.planner.packing import Machines, Nodes, Packing
from orchestrator.core.planner.planner_jobs import WAITS, Floats, Integers, used
from orchestrator.core.planner.prices import Prices, best_options

SWEEPS = 3

GAP = 5e-4
"""Of the bound: where less is left to gain, nothing is repaired."""


@dataclass(frozen=True, slots=True)
class Instance:
    """What is assigned: `values` and `devices` (options, jobs), the `island` of each option, `capacity` (islands,), and
    the machines of which the memory may run out.
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
    """`option` (jobs,) of each job, or WAITS. `nodes` by job, where memory of machines is a limit."""

    option: Integers
    nodes: Mapping[int, Nodes] = field(default_factory=dict)


def assign(instance: Instance, prices: Prices, sweeps: int = SWEEPS) -> Assignment:
    """Never more devices or memory than there are; nothing idle that a job fits."""
    if not instance.values.size:
        return Assignment(np.full(instance.values.shape[1], WAITS))
    best = _filled(instance, _greedy(instance, prices))
    worth = instance.worth(best.option)
    for _ in range(sweeps):
        before = worth
        for island in np.flatnonzero(instance.capacity > 0).tolist():
            if worth >= prices.bound * (1 - GAP):
                return best
            other = _filled(instance, _chosen_again(instance, best.option, prices.price, island))
            if (now := instance.worth(other.option)) > worth * (1 + 1e-9):
                best, worth = other, now
        if worth == before:
            break
    return best


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


def _filled(instance: Instance, option: Integers) -> Assignment:
    """With jobs that wait on what is free: those worth most there, and in the end any that fit. Those of `option` for
    which machines lack memory wait with them.
    """
    packing = _packed(instance, option)
    refused = np.zeros(instance.values.shape if packing else (0, 0), np.bool_)
    free = instance.free(option)
    while True:
        found = False
        for index in np.argsort(-free[instance.island], kind="stable").tolist():
            room = int(free[instance.island[index]])
            sizes = instance.devices[index]
            if not room:
                continue
            wanted = (option == WAITS) & (instance.values[index] > 0) & (sizes <= room)
            if packing:
                wanted &= packing.possible(index) & ~refused[index]
            if len(jobs := np.flatnonzero(wanted)):
                taken = jobs[choose(room, sizes[jobs], instance.values[index, jobs])]
                found = found or bool(len(taken))
                if packing:
                    fits = np.array([packing.add(job, index) for job in taken.tolist()], np.bool_)
                    refused[index, taken[~fits]] = True  # nor will it fit later: less is left
                    taken = taken[fits]
                option[taken] = index
                free[instance.island[index]] -= int(sizes[taken].sum())
        if not found:
            return Assignment(option, packing.nodes if packing else {})


def _packed(instance: Instance, option: Integers) -> Packing | None:
    """Jobs get nodes in the order of what they are worth for their share of the devices or of the memory, whichever is
    more of it.
    """
    if instance.machines is None:
        return None
    packing, runs = Packing(instance.machines, instance), np.flatnonzero(option != WAITS)
    held = option[runs]
    devices = instance.devices[held, runs] / np.maximum(instance.capacity[instance.island[held]], 1)
    size_bytes = instance.machines.nodes[held, runs] * instance.machines.node_bytes[held, runs]
    share = np.maximum(devices, size_bytes / max(float(instance.machines.free_bytes.sum()), 1.0))
    packing.add_all(option, runs[np.argsort(-instance.values[held, runs] / share, kind="stable")].tolist())
    return packing
