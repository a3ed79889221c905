"""The memory of machines whose devices share it, as a limit of the decision beside the devices of its islands.

A job that is chosen for an island with such a machine gets its nodes at once: only these say whether there is memory.
On other islands nodes are found when all is decided.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.core.planner.planner_jobs import WAITS, Integers, Options, Truths

OWN = -1
"""The machine of a node whose memory is no limit: it has its own, or there is enough for whatever runs there."""

Nodes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Machines:
    """Nodes of the islands on which memory is a limit: the `island` and `machine` (or OWN) of each and how many of its
    devices are `free`. `free_bytes` (machines,). `nodes` and `node_bytes` (options, jobs): how many nodes a job needs,
    and the shared memory on each. By job: `held`, the option and the nodes of one that runs, and `distance`
    (2, nodes), where it would rather not run, the weightier first.
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
        """With the columns of these jobs alone, and what is free as it is."""
        column = {job: at for at, job in enumerate(np.arange(self.nodes.shape[1])[jobs].tolist())}
        return replace(
            self,
            nodes=self.nodes[:, jobs],
            node_bytes=self.node_bytes[:, jobs],
            held={column[job]: held for job, held in self.held.items() if job in column},
            distance={column[job]: distance for job, distance in self.distance.items() if job in column},
        )


class Packing:
    """What nodes and machines have left while jobs get nodes, one after the other. `nodes` by job, of those islands
    only on which memory is a limit.
    """

    def __init__(self, machines: Machines, options: Options):
        self.machines, self._options = machines, options
        self._free = machines.free.copy()
        self._bytes = np.append(machines.free_bytes, np.iinfo(np.int64).max)  # the last is that of OWN
        self._here = {int(i): np.flatnonzero(machines.island == i) for i in np.unique(machines.island)}
        self.nodes: dict[int, Nodes] = {}

    def add_all(self, option: Integers, order: Iterable[int]) -> None:
        """The jobs that run as `option` says, those first that stay where they are, the others in this order. One for
        which there is no room waits from now on: `option` (jobs,) is changed.
        """
        order = list(order)
        stays = {job for job in order if self._stays(job, int(option[job]))}
        for job in stays:
            self.put(job, int(option[job]), self.machines.held[job][1])
        for job in order:
            if job not in stays and not self.add(job, int(option[job])):
                option[job] = WAITS

    def add(self, job: int, option: int) -> bool:
        """Whether there are nodes with enough devices and memory left for it, which it gets."""
        here = self._here.get(int(self._options.island[option]))
        if here is None:
            return True
        nodes = self._find(job, option, here)
        if nodes:
            self.put(job, option, nodes)
        return bool(nodes)

    def put(self, job: int, option: int, nodes: Nodes) -> None:
        """On these nodes, whatever they have left."""
        each, size_bytes = self._needs(job, option)
        for node in nodes:
            self._free[node] -= each
            if self.machines.machine[node] != OWN:
                self._bytes[self.machines.machine[node]] -= size_bytes
        self.nodes[job] = nodes

    def possible(self, option: int) -> Truths:
        """(jobs,) False for those that surely find no room as this option; quickly, for many jobs."""
        machines, here = self.machines, self._here.get(int(self._options.island[option]))
        if here is None:
            return np.ones(machines.nodes.shape[1], np.bool_)
        each = self._options.devices[option] // machines.nodes[option]
        idle = here[self._free[here] > 0]
        most_bytes = self._bytes[machines.machine[idle]].max(initial=-1)
        enough = machines.node_bytes[option] <= most_bytes
        return np.asarray(enough & (each <= self._free[here].max(initial=0)))

    def left(self, jobs: Integers) -> Machines:
        """What others may have of it, for these jobs."""
        return replace(self.machines.only(jobs), free=self._free.copy(), free_bytes=self._bytes[:-1].copy())

    def _stays(self, job: int, option: int) -> bool:
        return job in self.machines.held and self.machines.held[job][0] == option

    def _needs(self, job: int, option: int) -> tuple[int, int]:
        """(devices, bytes of shared memory) on each node"""
        each = int(self._options.devices[option, job]) // int(self.machines.nodes[option, job])
        return each, int(self.machines.node_bytes[option, job])

    def _find(self, job: int, option: int, here: Integers) -> Nodes:
        """The nearest and tightest; () where there are not enough. What runs there already stays on its own nodes."""
        each, size_bytes = self._needs(job, option)
        if self._stays(job, option):
            here = np.array(self.machines.held[job][1], np.int64)
        machine = self.machines.machine
        left_bytes = self._bytes[machine[here]]
        able = (self._free[here] >= each) & (left_bytes >= size_bytes)
        here, left_bytes = here[able], left_bytes[able]
        far, absent = self.machines.distance[job][:, here] if job in self.machines.distance else (here * 0, here * 0)
        nearest = np.lexsort((left_bytes, absent, self._free[here], far))
        return self._together(here[nearest].tolist(), int(self.machines.nodes[option, job]), size_bytes)

    def _together(self, nodes: list[int], count: int, size_bytes: int) -> Nodes:
        """The first `count` of these nodes that have the memory at the same time: some may stand on one machine."""
        found: list[int] = []
        left = {at: int(self._bytes[at]) for at in self.machines.machine[nodes].tolist() if at != OWN}
        for node in nodes:
            at = int(self.machines.machine[node])
            if at == OWN or left[at] >= size_bytes:
                found.append(node)
                if at != OWN:
                    left[at] -= size_bytes
            if len(found) == count:
                return tuple(found)
        return ()
