"""Respect the memory of machines whose devices share it, as a second limit beside the devices of islands.

A job that is chosen for an island with such a machine gets its nodes at once, because the memory depends on them. On
other islands nodes are chosen after the decision.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.core.plan.arrays.planner_jobs import WAITS, Integers, Options, Truths

NO_MACHINE = -1
"""Machine number of a node whose memory is not a limit: its devices have their own, or there is always enough."""

Nodes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Machines:
    """Nodes of the islands on which memory is a limit.

    By node: its `island`, its `machine` or NO_MACHINE, and its number of `free` devices. `free_bytes` (machines,).
    `nodes` and `node_bytes` (options, jobs): number of nodes that a job needs, and its shared memory on each. By job:
    `held`, option and nodes of a running job; `distance` (2, nodes), reasons to avoid a node, the more important first.
    """

    island: Integers
    machine: Integers
    free: Integers
    free_bytes: Integers
    nodes: Integers
    node_bytes: Integers
    held: Mapping[int, tuple[int, Nodes]]
    distance: Mapping[int, Integers]

    def only(self, jobs: Truths | Integers) -> "Machines":
        """Return these machines with the columns of these jobs only, and unchanged free capacity."""
        column = {job: at for at, job in enumerate(np.arange(self.nodes.shape[1])[jobs].tolist())}
        return replace(
            self,
            nodes=self.nodes[:, jobs],
            node_bytes=self.node_bytes[:, jobs],
            held={column[job]: option_and_nodes for job, option_and_nodes in self.held.items() if job in column},
            distance={column[job]: distance for job, distance in self.distance.items() if job in column},
        )


class Packing:
    """Remaining capacity of nodes and machines while jobs get nodes one by one.

    `nodes` by job, only for islands on which memory is a limit.
    """

    def __init__(self, machines: Machines, options: Options):
        self.machines, self._options = machines, options
        self._free = machines.free.copy()
        self._bytes = np.append(machines.free_bytes, np.iinfo(np.int64).max)  # the last entry is for NO_MACHINE
        self._island_nodes = {int(i): np.flatnonzero(machines.island == i) for i in np.unique(machines.island)}
        self.nodes: dict[int, Nodes] = {}

    def add_all(self, option: Integers, order: Iterable[int]) -> None:
        """Give nodes to the jobs that `option` runs: first to those that stay where they are, then in this order.

        A job without enough capacity has to wait: `option` (jobs,) is changed to WAITS.
        """
        order = list(order)
        stays = {job for job in order if self._stays(job, int(option[job]))}
        for job in stays:
            self.put(job, int(option[job]), self.machines.held[job][1])
        for job in order:
            if job not in stays and not self.add(job, int(option[job])):
                option[job] = WAITS

    def add(self, job: int, option: int) -> bool:
        """Give a job nodes with enough devices and memory. Return False if there are none."""
        island_nodes = self._island_nodes.get(int(self._options.island[option]))
        if island_nodes is None:
            return True
        nodes = self._find(job, option, island_nodes)
        if nodes:
            self.put(job, option, nodes)
        return bool(nodes)

    def put(self, job: int, option: int, nodes: Nodes) -> None:
        """Give a job these nodes, whatever their remaining capacity."""
        each, size_bytes = self._needs(job, option)
        for node in nodes:
            self._free[node] -= each
            if self.machines.machine[node] != NO_MACHINE:
                self._bytes[self.machines.machine[node]] -= size_bytes
        self.nodes[job] = nodes

    def possible(self, option: int) -> Truths:
        """Return (jobs,) False for jobs that certainly do not fit as this option. Fast, for many jobs."""
        machines, island_nodes = self.machines, self._island_nodes.get(int(self._options.island[option]))
        if island_nodes is None:
            return np.ones(machines.nodes.shape[1], np.bool_)
        each = self._options.devices[option] // machines.nodes[option]
        idle = island_nodes[self._free[island_nodes] > 0]
        most_bytes = self._bytes[machines.machine[idle]].max(initial=-1)
        enough = machines.node_bytes[option] <= most_bytes
        return np.asarray(enough & (each <= self._free[island_nodes].max(initial=0)))

    def left(self, jobs: Integers) -> Machines:
        """Return the remaining capacity for these jobs."""
        return replace(self.machines.only(jobs), free=self._free.copy(), free_bytes=self._bytes[:-1].copy())

    def _stays(self, job: int, option: int) -> bool:
        return job in self.machines.held and self.machines.held[job][0] == option

    def _needs(self, job: int, option: int) -> tuple[int, int]:
        """Return (devices, bytes of shared memory) that a job needs on each node."""
        each = int(self._options.devices[option, job]) // int(self.machines.nodes[option, job])
        return each, int(self.machines.node_bytes[option, job])

    def _find(self, job: int, option: int, candidates: Integers) -> Nodes:
        """Return the nearest and tightest nodes, () if there are too few. A job that stays keeps its own nodes."""
        each, size_bytes = self._needs(job, option)
        if self._stays(job, option):
            candidates = np.array(self.machines.held[job][1], np.int64)
        machine = self.machines.machine
        left_bytes = self._bytes[machine[candidates]]
        suitable = (self._free[candidates] >= each) & (left_bytes >= size_bytes)
        candidates, left_bytes = candidates[suitable], left_bytes[suitable]
        distance, absent = (
            self.machines.distance[job][:, candidates]
            if job in self.machines.distance
            else (candidates * 0, candidates * 0)
        )
        nearest = np.lexsort((left_bytes, absent, self._free[candidates], distance))
        return self._fitting_together(candidates[nearest].tolist(), int(self.machines.nodes[option, job]), size_bytes)

    def _fitting_together(self, nodes: list[int], count: int, size_bytes: int) -> Nodes:
        """Return the first `count` nodes that have the memory together, since some may share a machine."""
        chosen: list[int] = []
        left = {at: int(self._bytes[at]) for at in self.machines.machine[nodes].tolist() if at != NO_MACHINE}
        for node in nodes:
            at = int(self.machines.machine[node])
            if at == NO_MACHINE or left[at] >= size_bytes:
                chosen.append(node)
                if at != NO_MACHINE:
                    left[at] -= size_bytes
            if len(chosen) == count:
                return tuple(chosen)
        return ()
