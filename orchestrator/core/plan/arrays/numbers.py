"""Choose nodes and device numbers, after a decision that only counts devices per island."""

from collections import defaultdict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush


class FreeNumbers:
    """Free devices of one island by node, updated when devices are allocated and freed.

    Nodes are numbers. Of equally good nodes the lowest is chosen, so that the result does not depend on history.
    """

    def __init__(self, free: Iterable[tuple[int, ...]]):
        self._free = {node: sorted(numbers) for node, numbers in enumerate(free)}
        self._nodes: dict[int, list[int]] = defaultdict(list)  # by number of free devices; may contain outdated entries
        for node, numbers in self._free.items():
            self._nodes[len(numbers)].append(node)
        for nodes in self._nodes.values():
            heapify(nodes)
        self._most = max(self._nodes, default=0)

    @property
    def count(self) -> int:
        return sum(map(len, self._free.values()))

    def allocate(self, count: int) -> tuple[int, tuple[int, ...]] | None:
        """Allocate devices of one node, or return None if no node has enough free.

        The node with the fewest remaining free devices is chosen, so that large gangs still find idle nodes.
        """
        for free in range(count, self._most + 1):
            nodes = self._nodes.get(free)
            while nodes:
                node = heappop(nodes)
                numbers = self._free[node]
                if len(numbers) == free:
                    allocated, self._free[node] = tuple(numbers[:count]), numbers[count:]
                    heappush(self._nodes[free - count], node)
                    return node, allocated
        return None

    def release(self, node: int, numbers: Iterable[int]) -> None:
        """Free the devices of an attempt that has ended."""
        self._free[node] = sorted({*self._free[node], *numbers})
        now = len(self._free[node])
        heappush(self._nodes[now], node)
        self._most = max(self._most, now)

    def withdraw(self, node: int) -> tuple[int, ...]:
        """Remove and return all free devices of one node; `release` makes them available again."""
        numbers, self._free[node] = tuple(self._free[node]), []
        return numbers

    def place(self, counts: dict[str, int]) -> tuple[dict[str, tuple[int, tuple[int, ...]]], list[str]]:
        """Place the largest jobs first. Return (job -> node and its numbers, jobs for which no node has enough)."""
        placed, left = {}, []
        for job, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            if (allocated := self.allocate(count)) is None:
                left.append(job)
            else:
                placed[job] = allocated
        return placed, left
