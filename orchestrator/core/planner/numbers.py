"""Which devices of which nodes: the second half of a decision, whose first half only counts devices of an island."""

from collections import defaultdict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

Held = dict[int, tuple[int, ...]]
"""Node -> numbers of its devices."""


class Free:
    """The free devices of one island by node, kept by what is taken and given back. Nodes are numbers; of equal places
    the lowest is taken, so that the same is answered whatever happened before.
    """

    def __init__(self, free: Iterable[tuple[int, ...]]):
        self._free = {node: sorted(numbers) for node, numbers in enumerate(free)}
        self._nodes: dict[int, list[int]] = defaultdict(list)  # by how many are free; may hold nodes that changed since
        for node, numbers in self._free.items():
            self._nodes[len(numbers)].append(node)
        for nodes in self._nodes.values():
            heapify(nodes)
        self._most = max(self._nodes, default=0)

    @property
    def count(self) -> int:
        return sum(map(len, self._free.values()))

    def take(self, count: int) -> tuple[int, tuple[int, ...]] | None:
        """Devices of one node: of the one on which the fewest stay free, so that large gangs keep finding whole nodes.
        None where no node has so many free.
        """
        for free in range(count, self._most + 1):
            nodes = self._nodes.get(free)
            while nodes:
                node = heappop(nodes)
                numbers = self._free[node]
                if len(numbers) == free:
                    taken, self._free[node] = tuple(numbers[:count]), numbers[count:]
                    heappush(self._nodes[free - count], node)
                    return node, taken
        return None

    def give(self, node: int, numbers: Iterable[int]) -> None:
        """Back, of an attempt that has ended."""
        self._free[node] = sorted({*self._free[node], *numbers})
        now = len(self._free[node])
        heappush(self._nodes[now], node)
        self._most = max(self._most, now)

    def withdraw(self, node: int) -> tuple[int, ...]:
        """All that is free of one node: nothing of it is taken until it is given back."""
        numbers, self._free[node] = tuple(self._free[node]), []
        return numbers

    def place(self, counts: dict[str, int]) -> tuple[dict[str, tuple[int, tuple[int, ...]]], list[str]]:
        """(job -> node and its numbers, jobs for which no node has enough): the largest first."""
        placed, left = {}, []
        for job, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            if (found := self.take(count)) is None:
                left.append(job)
            else:
                placed[job] = found
        return placed, left
