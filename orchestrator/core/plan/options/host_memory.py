"""Memory of machines whose devices share it: CPUs, and GPUs without memory of their own.

Several nodes, also of different pools, may run on one machine; the memory that jobs request on any of them is counted
together, so that it is allocated only once. For a job that requests no memory, none is allocated.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from orchestrator.core.model import Candidate, Devices, Running
from orchestrator.core.plan.options.fit import gib, minimum_count

Allocation = tuple[tuple[str, tuple[int, ...]], ...]


class HostMemory:
    """Memory by machine: `free_bytes` is not allocated, `soon_bytes` is allocated to attempts that are stopping."""

    def __init__(self, devices: Mapping[str, Devices], running: Iterable[Running]):
        self._host = {have.id: have.host for have in devices.values() if have.host}
        self.total_bytes: dict[str, int] = {}
        for have in devices.values():
            if have.host:
                self.total_bytes[have.host] = max(self.total_bytes.get(have.host, 0), have.host_memory_bytes)
        self.free_bytes, self.freeing_bytes = dict(self.total_bytes), dict.fromkeys(self.total_bytes, 0)
        for attempt in running if self._host else ():
            for host, size_bytes in self.allocated_bytes(attempt).items():
                self.free_bytes[host] = max(0, self.free_bytes[host] - size_bytes)

    def allocated_bytes(self, attempt: Running) -> dict[str, int]:
        """Return the bytes by machine that are allocated to a running attempt."""
        want = attempt.want if self._host else None
        return {} if want is None else self._needed(want, attempt.allocation)

    def allocate(self, want: Candidate, allocation: Allocation) -> None:
        for host, size_bytes in self._needed(want, allocation).items():
            self.free_bytes[host] = max(0, self.free_bytes[host] - size_bytes)

    def count_as_stopping(self, attempt: Running) -> None:
        for host, size_bytes in self.allocated_bytes(attempt).items():
            self.freeing_bytes[host] += size_bytes

    def reserve(self, want: Candidate, devices_id: str, count: int) -> None:
        """Reserve memory for a waiting job; that of stopping attempts comes first, as with devices."""
        for host, size_bytes in self._needed(want, ((devices_id, tuple(range(count))),)).items():
            soon_bytes = min(self.freeing_bytes[host], size_bytes)
            self.freeing_bytes[host] -= soon_bytes
            self.free_bytes[host] = max(0, self.free_bytes[host] - (size_bytes - soon_bytes))

    def limit_free(self, want: Candidate, nodes: Sequence[Devices], need: int) -> list[Devices]:
        """Return `nodes`, their free devices reduced to those that have enough memory.

        Nodes of a gang on one machine share its memory: if it is not enough for `need` devices on each, some are left
        without free devices.
        """
        if not want.memory_bytes or not self._host:
            return [*nodes]
        sharing: dict[str, list[Devices]] = defaultdict(list)
        for have in nodes:
            if len(have.free) >= need:
                sharing[have.host].append(have)
        limits: dict[str, int] = {}
        for host, on_host in sharing.items():
            if not host:
                continue
            left = self.free_bytes[host] // want.memory_bytes
            together = min(len(on_host), want.nodes, left // max(need, 1))
            fullest = on_host if want.nodes == 1 else sorted(on_host, key=lambda d: (len(d.free), d.id))[:together]
            limits |= {have.id: left if want.nodes == 1 else left // together for have in fullest}
            limits |= {have.id: 0 for have in on_host if have.id not in limits}
        return [replace(d, free=tuple(sorted(d.free))[: limits[d.id]]) if d.id in limits else d for d in nodes]

    def refusal_reason(self, want: Candidate, have: Devices, need: int) -> str:
        """Say why a node has enough free devices, but not enough memory for them; else ""."""
        if not have.host or want.memory_bytes * need <= self.free_bytes[have.host]:
            return ""
        left, total = gib(self.free_bytes[have.host]), gib(self.total_bytes[have.host])
        return (
            f"shares the memory of machine {machine(have)}, of which {left} of {total} GiB are not allocated to other "
            f"jobs, but the job needs {gib(want.memory_bytes * need)} GiB"
        )

    def _needed(self, want: Candidate, allocation: Allocation) -> dict[str, int]:
        needed: dict[str, int] = defaultdict(int)
        for devices_id, numbers in allocation if want.memory_bytes else ():
            if host := self._host.get(devices_id):
                needed[host] += want.memory_bytes * len(numbers)
        return needed


class Availability:
    """Devices and memory that some nodes have free or freeing. `add` adds those of an attempt that would stop."""

    def __init__(self, want: Candidate, nodes: Iterable[Devices], counts: Mapping[str, int], memory: HostMemory):
        self._size_bytes, self._memory, self._counts = want.memory_bytes, memory, dict(counts)
        self._hosts = {have.id: have.host for have in nodes if have.host and want.memory_bytes}
        hosts = set(self._hosts.values())
        self._bytes = {host: memory.free_bytes[host] + memory.freeing_bytes[host] for host in hosts}

    def count_on(self, devices_id: str) -> int:
        """Return the number of devices that a job could get there."""
        host = self._hosts.get(devices_id)
        count = self._counts[devices_id]
        return count if host is None else min(count, max(0, self._bytes[host]) // self._size_bytes)

    def fullest(
        self, nodes: Iterable[Devices], need: int, preferred: Collection[str] = ()
    ) -> list[tuple[Devices, int]]:
        """Return nodes with the number of `need` devices that each would give if used together, the best first.

        Of equal ones, those in `preferred` (devices ids) come first.
        """
        left, pairs = dict(self._bytes), []
        order = sorted(nodes, key=lambda d: (-min(self.count_on(d.id), need), d.id not in preferred, d.total, d.id))
        for have in order:
            gives, host = min(self.count_on(have.id), need), self._hosts.get(have.id)
            if host is not None:
                gives = min(gives, max(0, left[host]) // self._size_bytes)
                left[host] -= gives * self._size_bytes
            pairs.append((have, gives))
        return sorted(pairs, key=lambda pair: -pair[1]) if self._hosts else pairs

    def lacks_memory(self, devices_id: str, need: int, gives: int) -> bool:
        """Return True if the node has `need` devices, but memory for fewer."""
        return self._counts[devices_id] >= need > gives

    def is_useful(self, attempt: Running) -> bool:
        """Return True if the end of this attempt frees devices or memory on these nodes."""
        has_devices = any(devices_id in self._counts for devices_id, _ in attempt.allocation)
        return has_devices or any(host in self._bytes for host in self._memory.allocated_bytes(attempt))

    def add(self, attempt: Running, sign: int) -> None:
        for devices_id, numbers in attempt.allocation:
            if devices_id in self._counts:
                self._counts[devices_id] += sign * len(numbers)
        if self._bytes:
            for host, size_bytes in self._memory.allocated_bytes(attempt).items():
                if host in self._bytes:
                    self._bytes[host] += sign * size_bytes

    def nodes(self, need: int) -> int:
        """Return on how many of the nodes `need` devices are available at the same time."""
        if not self._hosts:
            return sum(count >= need for count in self._counts.values())
        able = [devices_id for devices_id in self._counts if self.count_on(devices_id) >= need]
        on_host: dict[str | None, int] = defaultdict(int)
        for devices_id in able:
            on_host[self._hosts.get(devices_id)] += 1
        return sum(
            count if host is None else min(count, max(0, self._bytes[host]) // (self._size_bytes * max(need, 1)))
            for host, count in on_host.items()
        )

    def copy(self) -> "Availability":
        other = object.__new__(Availability)
        other._size_bytes, other._memory, other._hosts = self._size_bytes, self._memory, self._hosts
        other._counts, other._bytes = dict(self._counts), dict(self._bytes)
        return other


def max_nodes_together(want: Candidate, nodes: Sequence[Devices]) -> int:
    """Return on how many of these nodes of one island a candidate could run together if they were idle."""
    count = Counter(have.host for have in nodes)
    most = {
        have.host: have.host_memory_bytes // max(want.memory_bytes * minimum_count(want, have), 1) for have in nodes
    }
    return sum(min(on_host, most[host]) if host and want.memory_bytes else on_host for host, on_host in count.items())


def machine(have: Devices) -> str:
    """Return the machine's name without its address."""
    return have.host.partition("/")[0]
