"""Plan a job for one place (the devices of a kind in a pool), by planning a copy that accepts only that place. Pure."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from orchestrator.core.controller.scaling import NodeGroup
from orchestrator.core.explanation.offer_wait import earliest_start_s
from orchestrator.core.fleet.demand import demand
from orchestrator.core.model import Candidate, Devices, Job, Plan, Snapshot
from orchestrator.core.plan.options.capacity import request_key
from orchestrator.core.plan.options.fit import (
    PERMANENT_RULES,
    minimum_count,
    refusal_reason,
    right_kind,
    right_node,
    right_pool,
)
from orchestrator.core.plan.options.gang import PlacementOption, islands, too_few_nodes_reason
from orchestrator.core.plan.plan import plan
from orchestrator.core.plan.policies.fifo import fifo

Allocation = tuple[tuple[str, tuple[int, ...]], ...]


class When(StrEnum):
    """When an offer can start, the best first."""

    NOW = "now"
    PREEMPTS = "preempts"
    NEW_NODE = "new_node"
    WAITS = "waits"
    CLOSED = "closed"
    NEVER = "never"
    NOT_REQUESTED = "not_asked_for"


@dataclass(frozen=True, slots=True)
class Growth:
    """Nodes that an autoscaler may start: the arguments of `demand`."""

    groups: tuple[NodeGroup, ...] = ()
    unavailable_s: Mapping[str, float] = field(default_factory=dict)
    unusable: Mapping[str, Set[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlaceEvaluation:
    """Result for one place. `option` is what the job would get, or the request itself if no node suits. `earliest_s` as
    in offer_wait.py.
    """

    option: PlacementOption
    when: When
    min_count: int
    allocation: Allocation = ()
    after: tuple[str, ...] = ()
    ahead: int = 0
    reason: str = ""
    earliest_s: float | None = None


class PlaceEvaluator:
    """Runs the planner for one job and many places."""

    def __init__(self, job: Job, snapshot: Snapshot, may_grow: Growth):
        self._job, self._growth = job, may_grow
        self._snapshot = replace(snapshot, jobs=tuple(other for other in snapshot.jobs if other.id != job.id))
        queue = fifo(self._with_job(job))
        self._ahead = queue[: next(number for number, one in enumerate(queue) if one.id == job.id)]

    def evaluate(self, index: int, want: Candidate, devices: tuple[Devices, ...]) -> PlaceEvaluation:
        """Plan the job in one place. `devices` include those of nodes that may be started there."""
        suitable = [have for have in devices if not refusal_reason(want, have, PERMANENT_RULES)]
        by_island = islands(want, suitable)
        if not any(len(nodes) >= want.nodes for nodes in by_island.values()):
            reason = too_few_nodes_reason(want, by_island) or refusal_reason(want, devices[0], PERMANENT_RULES)
            is_other = all(refusal_reason(want, have, (right_kind, right_pool, right_node)) for have in devices)
            requested = PlacementOption(index, want.count, devices[: want.nodes])
            return PlaceEvaluation(
                requested, When.NOT_REQUESTED if is_other else When.NEVER, want.min_count, reason=reason
            )
        restricted, snapshot = self._restricted_to(want, devices[0])
        next_plan = plan(snapshot)
        start = next((s for s in next_plan.start if s.job == restricted.id), None)
        if start:
            by_id = {have.id: have for have in devices}
            granted = PlacementOption(
                index, len(start.allocation[0][1]), tuple(by_id[devices_id] for devices_id, _ in start.allocation)
            )
            return PlaceEvaluation(granted, When.NOW, granted.count, start.allocation, earliest_s=0.0)
        after = tuple(p.victim for p in next_plan.preempt if p.job == restricted.id)
        when, reason = (When.PREEMPTS, "") if after else self._waiting_state(snapshot, next_plan, suitable)
        why = next_plan.why_not[restricted.id]
        plan_reason = why.get((0, "")) or next((why[0, have.id] for have in suitable if (0, have.id) in why), "")
        ahead = self._count_rivals(next_plan, suitable)
        possible = _option(index, want, suitable)
        earliest_s = earliest_start_s(want, suitable, self._snapshot) if when is When.WAITS else None
        return PlaceEvaluation(
            possible, when, minimum_count(want, suitable[0]), (), after, ahead, reason or plan_reason, earliest_s
        )

    def _restricted_to(self, want: Candidate, devices_there: Devices) -> tuple[Job, Snapshot]:
        """Return a job that accepts only this kind and pool, and its snapshot.

        A kind also matches slices of it; these devices are then set to unschedulable.
        """
        candidate = replace(want, kinds=(devices_there.kind,), pool=devices_there.pool)
        job = replace(self._job, candidates=(candidate,), first_candidate=0)
        snapshot = self._with_job(job)
        matching = [d for d in snapshot.devices if not (right_kind(candidate, d) or right_pool(candidate, d))]
        closed = {have.id for have in matching if have.kind != devices_there.kind}
        devices = tuple(replace(d, schedulable=False) if d.id in closed else d for d in snapshot.devices)
        return job, replace(snapshot, devices=devices) if closed else snapshot

    def _with_job(self, job: Job) -> Snapshot:
        return replace(self._snapshot, jobs=(*self._snapshot.jobs, job))

    def _waiting_state(self, snapshot: Snapshot, next_plan: Plan, suitable: list[Devices]) -> tuple[When, str]:
        """Return how the job waits, and a reason that the plan does not contain, or ""."""
        pool, growth = suitable[0].pool, self._growth
        existing = {have.id for have in snapshot.devices}
        reason = ""
        if any(have.id not in existing for have in suitable):
            demanded = demand(snapshot, next_plan, growth.groups, growth.unavailable_s, growth.unusable)
            if demanded.jobs.get(self._job.id) == pool:
                return When.NEW_NODE, ""
            reason = demanded.why_not.get(self._job.id, "")
        if any(have.schedulable and have.id in existing for have in suitable):
            return When.WAITS, ""
        closed = next((have.reason for have in suitable if have.id in existing), "")
        return When.CLOSED, closed or reason

    def _count_rivals(self, next_plan: Plan, suitable: list[Devices]) -> int:
        """Count the jobs ahead that could use these devices, without those that start elsewhere now."""
        ids = {have.id for have in suitable}
        elsewhere = {start.job for start in next_plan.start if start.allocation[0][0] not in ids}
        cache: dict[tuple[object, ...], bool] = {}

        def accepts(want: Candidate) -> bool:
            key = request_key(want)
            if key not in cache:
                cache[key] = any(not refusal_reason(want, have, PERMANENT_RULES) for have in suitable)
            return cache[key]

        return sum(job.id not in elsewhere and any(map(accepts, job.candidates)) for job in self._ahead)


def _option(index: int, want: Candidate, devices: Iterable[Devices]) -> PlacementOption:
    """Return the most that the job could get there."""
    largest = sorted(devices, key=lambda have: -have.total)[: want.nodes]
    return PlacementOption(
        index, largest[0].total if want.exclusive else min(want.count, largest[-1].total), tuple(largest)
    )
