"""Choose the attempts that stop for a job which does not fit now.

Attempts that may stop for it: those of lower priority, those of the same priority that a full decision would place
elsewhere (core/plan/moves.py), and those that run beyond the quota of their project, for a job that is entitled to such
devices (quota.py). For a job that lacks quota, attempts of lower priority of its own project stop, unless the project
may borrow: then they become borrowers. For a job that can only borrow, only such borrowers stop.
"""

from collections.abc import Collection
from dataclasses import dataclass

from orchestrator.core.model import Job, Running
from orchestrator.core.plan.options.capacity import FreeCapacity
from orchestrator.core.plan.options.host_memory import Availability


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """Request of a job for `count` devices of `kind` on each of `nodes` nodes, for its candidate number `candidate`.

    `equals`: jobs of the same priority whose attempts may stop for it, too. `borrows`: it has no quota left for them.
    """

    job: Job
    candidate: int
    count: int
    nodes: int
    kind: str
    capacity: FreeCapacity
    equals: frozenset[str] = frozenset()
    borrows: bool = False

    @property
    def devices(self) -> int:
        return self.count * self.nodes

    def is_within_quota(self, victims: Collection[Running]) -> bool:
        """Return True if the job may have the devices once `victims` have stopped; a borrower always may."""
        return self.borrows or self.capacity.quota.is_within(self.job, self.devices, self.kind, victims)


def fewest_victims(request: DeviceRequest, available: Availability) -> list[Running]:
    """Return a minimal set of attempts to stop, or [] if stopping all of them is not enough.

    Those that continue running first: those that do not borrow, because others stop borrowers, then higher priority,
    then submitted earlier, then by name.
    """
    helpful = [attempt for attempt in _stoppable(request) if _is_useful(attempt, request, available)]
    left, victims = available.copy(), list(helpful)
    for attempt in helpful:
        left.add(attempt, 1)
    if not _is_enough(request, left, victims):
        return []
    for attempt in sorted(helpful, key=lambda r: (_borrows_beside(r, request), -r.priority, r.order, r.job)):
        left.add(attempt, -1)
        victims.remove(attempt)
        if not _is_enough(request, left, victims):
            left.add(attempt, 1)
            victims.append(attempt)
    return victims


def _stoppable(request: DeviceRequest) -> list[Running]:
    capacity, job = request.capacity, request.job
    lower = capacity.lower_priority(job.priority)
    if request.borrows:
        return [attempt for attempt in lower if capacity.quota.is_own_borrower(attempt, job)]
    names = sorted({*request.equals, *capacity.quota.borrowed})
    others = (capacity.running[name] for name in names if name in capacity.running)
    return [*lower, *(r for r in others if r.priority >= job.priority and _may_be_stopped(r, request))]


def _may_be_stopped(attempt: Running, request: DeviceRequest) -> bool:
    is_equal = attempt.job in request.equals and attempt.preemptible and attempt.priority == request.job.priority
    return is_equal or request.capacity.quota.must_return(attempt, request.job, request.kind)


def _is_useful(attempt: Running, request: DeviceRequest, available: Availability) -> bool:
    """Return True if the end of this attempt frees devices, memory or quota that the job needs and may have."""
    return available.is_useful(attempt) or (
        request.capacity.quota.counts_against(request.job, attempt, request.kind) and not request.is_within_quota(())
    )


def _borrows_beside(attempt: Running, request: DeviceRequest) -> bool:
    return request.capacity.quota.borrows_beside(attempt, request.job, request.devices, request.kind)


def _is_enough(request: DeviceRequest, available: Availability, victims: Collection[Running]) -> bool:
    return available.nodes(request.count) >= request.nodes and request.is_within_quota(victims)
