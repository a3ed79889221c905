"""Free capacity of the fleet while a plan is made: starts as the snapshot and shrinks with every decision."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from orchestrator.core.model import Candidate, Devices, Job, Running, Snapshot
from orchestrator.core.placement_slots import Island
from orchestrator.core.plan.options.fit import STATIC_RULES, refusal_reason
from orchestrator.core.plan.options.gang import PlacementOption, island_of
from orchestrator.core.plan.options.host_memory import HostMemory
from orchestrator.core.plan.options.quota import Quota

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CandidateNodes:
    """Devices ids by island where a candidate could run if enough were free, in a fixed order.

    `refused` holds the other devices: pairs of a reason and the ids of equal devices that it applies to.
    """

    islands: dict[Island, tuple[str, ...]]
    refused: tuple[tuple[str, tuple[str, ...]], ...]


class FreeCapacity:
    """Capacity that is still available to the jobs of one plan.

    `devices`: their `free` excludes allocated and reserved devices. `freeing`: devices of attempts that are stopping.
    `reserved`: number of reserved devices by devices id and job. `missing`: number of devices that blocked jobs still
    lack, by devices id: the next devices that become free there are theirs. `waits_on`: what blocked jobs waited for.
    `version` grows with every change; while it is the same, a job that did not fit still does not fit.
    """

    def __init__(self, snapshot: Snapshot):
        self.devices: dict[str, Devices] = {d.id: d for d in sorted(snapshot.devices, key=lambda d: d.id)}
        self.running: dict[str, Running] = {r.job: r for r in sorted(snapshot.running, key=lambda r: r.job)}
        self.memory = HostMemory(self.devices, self.running.values())
        self.freeing: dict[str, Numbers] = {}
        self.reserved: dict[str, dict[str, int]] = {}
        self.missing: dict[str, int] = {}
        self.waits_on = snapshot.memory.waits_on
        self.version = 0
        self._lower_priority: dict[int, list[Running]] = {}
        self._attempts = snapshot.running
        self._holders: dict[str, list[str]] = {}
        self.quota = Quota(snapshot.projects, snapshot.running)
        self._candidate_nodes: dict[tuple[object, ...], CandidateNodes] = {}
        self._shapes: dict[tuple[object, ...], int] = {}
        self._shapes_of_jobs: dict[str, tuple[Job | None, int]] = {}
        alike: dict[tuple[object, ...], list[str]] = {}
        for have in self.devices.values():
            alike.setdefault(_group_key(have), []).append(have.id)
        self._alike = [tuple(ids) for ids in alike.values()]
        for attempt in list(self.running.values()):
            if attempt.stopping:
                self.count_as_stopping(attempt)

    def candidate_nodes(self, want: Candidate) -> CandidateNodes:
        """Return the nodes for a candidate. Cached by request, because a queue has many jobs and few kinds of them."""
        key = request_key(want)
        if key not in self._candidate_nodes:
            self._candidate_nodes[key] = self._find_nodes(want)
        return self._candidate_nodes[key]

    def _find_nodes(self, want: Candidate) -> CandidateNodes:
        """Apply the rules once for each group of devices that are equal for them."""
        able: dict[Island, list[tuple[str, ...]]] = {}
        refused = []
        for ids in self._groups(want):
            have = self.devices[ids[0]]
            if why := refusal_reason(want, have, STATIC_RULES):
                refused.append((why, ids))
            else:
                able.setdefault(island_of(want, have), []).append(ids)
        merged = {island: _merged(groups) for island, groups in sorted(able.items())}
        return CandidateNodes(merged, tuple(refused))

    def _groups(self, want: Candidate) -> Iterable[tuple[str, ...]]:
        return ((devices_id,) for devices_id in self.devices) if want.node else self._alike

    def allocate(self, want: Candidate, option: PlacementOption) -> None:
        self.memory.allocate(want, option.allocation)
        for devices_id, numbers in option.allocation:
            self._remove(devices_id, numbers)

    def count_as_stopping(self, attempt: Running) -> None:
        """Count the devices of an attempt as soon free, and exclude it as a victim of other jobs."""
        self.version += 1
        self.quota.count_as_stopping(attempt)
        self.memory.count_as_stopping(attempt)
        del self.running[attempt.job]
        self._lower_priority.clear()
        for devices_id, numbers in attempt.allocation:
            self.freeing[devices_id] = tuple(sorted({*self.freeing.get(devices_id, ()), *numbers}))

    def lower_priority(self, priority: int) -> list[Running]:
        """Return attempts of lower priority that may be stopped."""
        if priority not in self._lower_priority:
            self._lower_priority[priority] = [
                r for r in self.running.values() if r.priority < priority and r.preemptible
            ]
        return self._lower_priority[priority]

    def holders(self, devices_ids: Iterable[str]) -> list[str]:
        """Return the jobs whose attempts hold any of these devices."""
        if not self._holders:
            for attempt in self._attempts:
                for devices_id, numbers in attempt.allocation:
                    if numbers:
                        self._holders.setdefault(devices_id, []).append(attempt.job)
        return sorted({job for devices_id in devices_ids for job in self._holders.get(devices_id, ())})

    def available_soon(self, devices_id: str) -> int:
        """Return the number of devices that are free, or will be once stopping attempts have ended, minus the number
        that blocked jobs still lack there. It is negative if these jobs will lack devices even then.
        """
        freeing = len(self.freeing.get(devices_id, ()))
        return len(self.devices[devices_id].free) + freeing - self.missing.get(devices_id, 0)

    def reserve(self, job: str, want: Candidate, devices_id: str, count: int) -> None:
        """Reserve `count` devices for a waiting job.

        Those of stopping attempts come first, so that other jobs can use the free ones.
        """
        self.memory.reserve(want, devices_id, count)
        soon = self.freeing.get(devices_id, ())
        if soon:
            self.version += 1
            self.freeing[devices_id] = soon[count:]
        idle = sorted(self.devices[devices_id].free)[: max(0, count - len(soon))]
        if idle:
            self._remove(devices_id, idle)
            self.reserved.setdefault(devices_id, {})[job] = len(idle)
        if (missing := count - len(soon) - len(idle)) > 0:
            self.missing[devices_id] = self.missing.get(devices_id, 0) + missing

    def reservation_note(self, devices_id: str) -> str:
        """Return an addition to a refusal that names the jobs for which free devices are reserved."""
        reserved = self.reserved.get(devices_id, {})
        return "".join(
            f"; {count} more reserved for {job}, which is ahead in the queue" for job, count in reserved.items()
        )

    def shape(self, job: Job) -> int:
        """Return a number that is equal for jobs that a plan treats alike.

        Cached by job, because a plan needs it several times for each waiting job, and the key of a shape is long.
        """
        cached, shape = self._shapes_of_jobs.get(job.id, (None, 0))
        if cached is not job:
            shape = self._shapes.setdefault(self._shape_key(job), len(self._shapes))
            self._shapes_of_jobs[job.id] = job, shape
        return shape

    def _shape_key(self, job: Job) -> tuple[object, ...]:
        vendor = "" if job.recovery.cross_vendor else job.backend
        wants = tuple([request_key(want) for want in job.candidates])
        project = (job.project, job.preemptible) if job.project in self.quota.projects else ""
        key = (job.ordered, job.first_candidate, job.avoid, job.checkpoint_in)
        return (job.priority, job.objective, project, vendor, *key, wants)

    def _remove(self, devices_id: str, numbers: Iterable[int]) -> None:
        self.version += 1
        have = self.devices[devices_id]
        self.devices[devices_id] = replace(have, free=tuple(sorted(set(have.free) - set(numbers))))


def _merged(groups: list[tuple[str, ...]]) -> tuple[str, ...]:
    return groups[0] if len(groups) == 1 else tuple(sorted(devices_id for ids in groups for devices_id in ids))


def _group_key(have: Devices) -> tuple[object, ...]:
    """Return a key of the facts that STATIC_RULES and islands depend on, except the node's name.

    A node that takes no jobs may have a reason of its own, so that is part of the key.
    """
    closed_reason = have.reason or have.node if not have.schedulable else ""
    where = (have.pool, have.kind, have.backend, have.environment)
    memory = (have.memory_bytes, have.host_memory_bytes if have.host else 0)
    tpu_slice = have.tpu_slice and (have.tpu_slice.name, have.tpu_slice.hosts)
    return (*where, *memory, tpu_slice, have.total, have.emulated, have.price_per_hour, closed_reason)


request_key: Callable[[Candidate], tuple[object, ...]] = attrgetter(
    *(f.name for f in fields(Candidate) if f.metadata.get("decides_devices", True))
)
"""Return a key of the fields that decide on which devices a candidate may run."""
