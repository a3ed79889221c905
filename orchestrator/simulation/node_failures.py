"""Failures and repairs of nodes during a replay, and the jobs on each node."""

import math
from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from cluster.errors import PolyfleetError
from orchestrator.core.plan.arrays.numbers import FreeNumbers
from orchestrator.simulation.fleets import Failures, Fleet

Node = tuple[int, int]
"""(number of its kind, number of the node within the kind)"""


class Outages:
    """Endless sequence of nodes that go down or come back.

    What happens to a node depends only on the seed, the name of its kind, and its number.
    """

    def __init__(self, fleet: Fleet, failures: Failures):
        self._kinds, self._failures = fleet.kinds, failures
        self._drawn: dict[Node, int] = defaultdict(int)
        scheduled = [
            (at_s, o.kind, o.node, down, False) for o in failures.outages for at_s, down in _changes(o.down_s, o.up_s)
        ]
        self._due = scheduled + [due for kind in range(len(fleet.kinds)) for due in self._first(fleet, kind)]
        heapify(self._due)

    @property
    def next_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def until(self, now_s: float) -> Iterator[tuple[Node, bool]]:
        """Yield (node, True if it fails or False if it returns) for all changes until `now_s`."""
        while self._due and self._due[0][0] <= now_s:
            at_s, kind, node, down, by_chance = heappop(self._due)
            if by_chance:
                nodes = self._failures.nodes[kind]
                lasts_s = self._lasts_s((kind, node), nodes.repair_s if down else nodes.mtbf_s)
                heappush(self._due, (at_s + lasts_s, kind, node, not down, True))
            yield (kind, node), down

    def _first(self, fleet: Fleet, kind: int) -> Iterator[tuple[float, int, int, bool, bool]]:
        mtbf_s = self._failures.nodes[kind].mtbf_s
        for node, _ in enumerate(fleet.sizes(kind)) if math.isfinite(mtbf_s) else ():
            yield self._lasts_s((kind, node), mtbf_s), kind, node, True, True

    def _lasts_s(self, node: Node, mean_s: float) -> float:
        """Draw the node's next exponentially distributed time."""
        self._drawn[node] += 1
        text = f"{self._failures.seed} {self._drawn[node]} {node[1]} {self._kinds[node[0]]}"
        drawn = int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) >> 11
        return -mean_s * math.log1p(-drawn / 2**53)


def _changes(down_s: float, up_s: float) -> tuple[tuple[float, bool], tuple[float, bool]]:
    return (down_s, True), (up_s, False)


class FailingNodes:
    """Places jobs on nodes that fail.

    `capacity` (kinds,): devices of nodes that are up. A gang is on one node if one has enough free devices, else on
    several, chosen greedily. `failed`: number of failures of nodes.
    """

    def __init__(self, fleet: Fleet, failures: Failures):
        self.outages = Outages(fleet, failures)
        self.capacity: NDArray[np.int64] = fleet.devices.copy()
        self.failed = 0
        self._size = [nodes.size for nodes in failures.nodes]
        self._free = [FreeNumbers(tuple(range(size)) for size in fleet.sizes(kind)) for kind in range(len(fleet.kinds))]
        self._allocations: dict[
            int, tuple[int, list[tuple[int, tuple[int, ...]]]]
        ] = {}  # job -> kind, [(node, numbers)]
        self._on: dict[Node, set[int]] = defaultdict(set)
        self._down: dict[Node, int] = defaultdict(int)  # how many outages it is in; they may overlap
        self._withdrawn: dict[Node, tuple[int, ...]] = {}

    @property
    def any_down(self) -> bool:
        return bool(self._withdrawn)

    def jobs_on(self, node: Node) -> list[int]:
        return sorted(self._on[node])

    def place(self, jobs: dict[int, tuple[int, int]]) -> None:
        """Place jobs, the largest first. `jobs` are (kind, devices) by job. There must be enough free devices."""
        for job, (kind, devices) in sorted(jobs.items(), key=lambda item: (-item[1][1], item[0])):
            self._allocations[job] = kind, list(self._allocate(kind, devices))
            for node, _ in self._allocations[job][1]:
                self._on[kind, node].add(job)

    def release(self, jobs: list[int]) -> None:
        for job in jobs:
            kind, allocations = self._allocations.pop(job)
            for node, numbers in allocations:
                self._free[kind].release(node, numbers)
                self._on[kind, node].discard(job)

    def take_down(self, node: Node) -> None:
        """Take a node out. No job may hold its devices any more."""
        self._down[node] += 1
        if self._down[node] == 1:
            self.failed += 1
            self._withdrawn[node] = self._free[node[0]].withdraw(node[1])
            self.capacity[node[0]] -= len(self._withdrawn[node])

    def bring_back(self, node: Node) -> None:
        self._down[node] -= 1
        if not self._down[node]:
            numbers = self._withdrawn.pop(node)
            self._free[node[0]].release(node[1], numbers)
            self.capacity[node[0]] += len(numbers)

    def _allocate(self, kind: int, devices: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        maximum = self._size[kind]
        while devices:
            if not maximum:
                raise PolyfleetError(f"{devices} more devices were allocated than exist", "open an issue")
            result = self._free[kind].allocate(min(devices, maximum))
            if result is None:
                maximum = min(devices, maximum) - 1
            else:
                devices -= len(result[1])
                yield result
