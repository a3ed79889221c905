"""Find the machines on which memory limits a decision, from the remaining capacity of the fleet."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.core.model import Candidate, Devices, Job, Running
from orchestrator.core.placement_slots import Island
from orchestrator.core.plan.arrays.machine_memory import NO_MACHINE, Machines, Nodes
from orchestrator.core.plan.arrays.planner_jobs import Integers, Work
from orchestrator.core.plan.options.capacity import FreeCapacity
from orchestrator.core.plan.options.gang import count_missing, is_far


@dataclass(frozen=True, slots=True)
class Obtainable:
    """What a job could get if everything that may stop for it stopped.

    `devices`: number by devices id, of schedulable ones. `memory_bytes`: by machine, if its devices share memory.
    """

    devices: Mapping[str, int]
    memory_bytes: Mapping[str, int]
    capacity: FreeCapacity

    @classmethod
    def of(cls, moving: Iterable[Running], capacity: FreeCapacity, lower: int) -> "Obtainable":
        """Include what attempts in `moving` and those below priority `lower` hold."""
        devices = {have.id: capacity.available_soon(have.id) for have in capacity.devices.values() if have.schedulable}
        memory, stopping = capacity.memory, (*moving, *capacity.lower_priority(lower))
        for attempt in stopping:
            for devices_id, numbers in attempt.allocation:
                if devices_id in devices:
                    devices[devices_id] += len(numbers)
        devices = {devices_id: max(0, number) for devices_id, number in devices.items()}
        left = {host: size_bytes + memory.freeing_bytes[host] for host, size_bytes in memory.free_bytes.items()}
        for attempt in stopping if left else ():
            for host, size_bytes in memory.allocated_bytes(attempt).items():
                left[host] += size_bytes
        most = memory.total_bytes
        return cls(devices, {host: min(size_bytes, most[host]) for host, size_bytes in left.items()}, capacity)

    def counts_on(self, nodes: Iterable[str], want: Candidate) -> list[int]:
        """Return, for each node (a devices id), the number of devices for which there is enough memory."""
        if not (self.memory_bytes and want.memory_bytes):
            return [self.devices.get(devices_id, 0) for devices_id in nodes]
        hosts = ((devices_id, self.capacity.devices[devices_id].host) for devices_id in nodes)
        most = {host: size_bytes // want.memory_bytes for host, size_bytes in self.memory_bytes.items()}
        return [min(count := self.devices.get(devices_id, 0), most.get(host, count)) for devices_id, host in hosts]

    def limited(self, device_bytes: Mapping[Island, int]) -> tuple[list[Devices], list[str]]:
        """Return (nodes of islands on which memory is a limit, machines whose memory is the limit).

        `device_bytes`: the most that any job requests per device of an island. A machine with that much memory for all
        its devices is not a limit.
        """
        requested_bytes = dict.fromkeys(self.memory_bytes, 0)
        islands: dict[str, set[Island]] = {}
        nodes = [self.capacity.devices[devices_id] for devices_id in self.devices]
        for have in nodes:
            if have.host and (size_bytes := device_bytes.get(island_of(have), 0)):
                requested_bytes[have.host] += size_bytes * self.devices[have.id]
                islands.setdefault(have.host, set()).add(island_of(have))
        short = [host for host, size_bytes in requested_bytes.items() if size_bytes > self.memory_bytes[host]]
        limited_islands = {island for host in short for island in islands[host]}
        return [have for have in nodes if island_of(have) in limited_islands], short


@dataclass(frozen=True, slots=True)
class Needs:
    """Requests (options, jobs): number of nodes, and memory per device."""

    nodes: Integers
    device_bytes: Integers


def limited_machines(
    obtainable: Obtainable,
    islands: Sequence[Island],
    work: Work,
    needs: Needs,
    jobs: Sequence[Job],
    running: Sequence[Running],
) -> tuple[Machines | None, tuple[str, ...]]:
    """Return (machines whose memory is a limit, or None, and the devices id of each node).

    `jobs` are the columns of `work`; the last ones are those of the attempts `running`.
    """
    most = needs.device_bytes.max(axis=1, initial=0)
    by_island = {island: int(most[work.island == at].max(initial=0)) for at, island in enumerate(islands)}
    nodes, short = obtainable.limited(by_island)
    if not short:
        return None, ()
    positions, hosts = {island: at for at, island in enumerate(islands)}, {host: at for at, host in enumerate(short)}
    island = np.array([positions[island_of(have)] for have in nodes], np.int64)
    limited = np.isin(work.island, island)[:, None]
    limits = Machines(
        island,
        np.array([hosts.get(have.host, NO_MACHINE) for have in nodes], np.int64),
        np.array([obtainable.devices[have.id] for have in nodes], np.int64),
        np.array([obtainable.memory_bytes[each] for each in short], np.int64),
        needs.nodes,
        np.where(limited, needs.device_bytes * (work.devices // needs.nodes), 0),
        _held_nodes(work, running, {have.id: at for at, have in enumerate(nodes)}),
        {
            column: _distance(job, nodes)
            for column, job in enumerate(jobs)
            if job.avoid or job.checkpoint_in or job.data
        },
    )
    return limits, tuple(have.id for have in nodes)


def _held_nodes(work: Work, running: Sequence[Running], nodes: Mapping[str, int]) -> dict[int, tuple[int, Nodes]]:
    """Return, by column, the option of a running attempt and its nodes."""
    columns = range(work.jobs - len(running), work.jobs)
    return {
        column: (int(work.held[column]), tuple(nodes[devices_id] for devices_id, _ in attempt.allocation))
        for column, attempt in zip(columns, running, strict=True)
        if all(devices_id in nodes for devices_id, _ in attempt.allocation)
    }


def _distance(job: Job, nodes: Sequence[Devices]) -> Integers:
    """Return the distance of nodes from a job in two rows, with the criteria of gang.option."""
    return np.array(
        [[2 * (d.node in job.avoid) + is_far(job, d) for d in nodes], [count_missing(job.data, d) for d in nodes]]
    )


def island_of(have: Devices) -> Island:
    return Island(have.pool, have.kind, have.backend, have.environment)
