"""What the planner says of a job in one place, the devices of a kind in a pool: it is asked about one that accepts only
those. Pure.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from orchestrator.core.capacity import asked
from orchestrator.core.demand import NodeGroup, demand
from orchestrator.core.fit import EVER, least, refusal, right_kind, right_node, right_pool
from orchestrator.core.gang import Option, islands, too_few_nodes
from orchestrator.core.model import Candidate, Devices, Job, Plan, Snapshot
from orchestrator.core.plan import plan
from orchestrator.core.policies.fifo import fifo

Leases = tuple[tuple[str, tuple[int, ...]], ...]


class When(StrEnum):
    """The best first."""

    NOW = "now"
    PREEMPTS = "preempts"
    NEW_NODE = "new_node"
    WAITS = "waits"
    CLOSED = "closed"
    NEVER = "never"
    NOT_ASKED_FOR = "not_asked_for"


@dataclass(frozen=True, slots=True)
class Growth:
    """What an autoscaler may start: `demand`'s groups, pools that could not be had until when, and useless nodes."""

    groups: tuple[NodeGroup, ...] = ()
    unavailable_s: Mapping[str, float] = field(default_factory=dict)
    useless: Mapping[str, Set[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """`option` is what it would get, as far as that is known."""

    option: Option
    when: When
    min_count: int
    leases: Leases = ()
    after: tuple[str, ...] = ()
    ahead: int = 0
    reason: str = ""


class Asker:
    """Asks the planner about one job and many places."""

    def __init__(self, job: Job, snapshot: Snapshot, may_grow: Growth):
        self._job, self._growth = job, may_grow
        self._snapshot = replace(snapshot, jobs=tuple(other for other in snapshot.jobs if other.id != job.id))
        line = fifo(self._with(job))
        self._ahead = line[: next(number for number, one in enumerate(line) if one.id == job.id)]

    def answer(self, index: int, want: Candidate, devices: tuple[Devices, ...]) -> Answer:
        """`devices` are those of one place, also of nodes that may be started there."""
        able = [have for have in devices if not refusal(want, have, EVER)]
        there = islands(want, able)
        if not any(len(nodes) >= want.nodes for nodes in there.values()):
            reason = too_few_nodes(want, there) or refusal(want, devices[0], EVER)
            other = all(refusal(want, have, (right_kind, right_pool, right_node)) for have in devices)
            wanted = Option(index, want.count, devices[: want.nodes])
            return Answer(wanted, When.NOT_ASKED_FOR if other else When.NEVER, want.min_count, reason=reason)
        only, seen = self._question(want, devices[0])
        decided = plan(seen)
        start = next((s for s in decided.start if s.job == only.id), None)
        if start:
            by_id = {have.id: have for have in devices}
            held = Option(index, len(start.leases[0][1]), tuple(by_id[devices_id] for devices_id, _ in start.leases))
            return Answer(held, When.NOW, held.count, start.leases)
        after = tuple(p.victim for p in decided.preempt if p.job == only.id)
        when, reason = (When.PREEMPTS, "") if after else self._waits(seen, decided, able)
        why = decided.why_not[only.id]
        told = why.get((0, "")) or next((why[0, have.id] for have in able if (0, have.id) in why), "")
        ahead = self._rivals(decided, able)
        place = _option(index, want, able)
        return Answer(place, when, least(want, able[0]), (), after, ahead, reason or told)

    def _question(self, want: Candidate, place: Devices) -> tuple[Job, Snapshot]:
        """A job that accepts only this kind and pool. A kind's name takes slices of it too: those are closed then."""
        only = replace(want, kinds=(place.kind,), pool=place.pool)
        job = replace(self._job, candidates=(only,), first_candidate=0)
        seen = self._with(job)
        alike = [d for d in seen.devices if not (right_kind(only, d) or right_pool(only, d))]
        closed = {have.id for have in alike if have.kind != place.kind}
        devices = tuple(replace(d, schedulable=False) if d.id in closed else d for d in seen.devices)
        return job, replace(seen, devices=devices) if closed else seen

    def _with(self, job: Job) -> Snapshot:
        return replace(self._snapshot, jobs=(*self._snapshot.jobs, job))

    def _waits(self, seen: Snapshot, decided: Plan, able: list[Devices]) -> tuple[When, str]:
        """What for; the reason, where the plan has not got it."""
        pool, grows = able[0].pool, self._growth
        here = {have.id for have in seen.devices}
        reason = ""
        if any(have.id not in here for have in able):
            found = demand(seen, decided, grows.groups, grows.unavailable_s, grows.useless)
            if found.jobs.get(self._job.id) == pool:
                return When.NEW_NODE, ""
            reason = found.why_not.get(self._job.id, "")
        if any(have.schedulable and have.id in here for have in able):
            return When.WAITS, ""
        closed = next((have.reason for have in able if have.id in here), "")
        return When.CLOSED, closed or reason

    def _rivals(self, decided: Plan, able: list[Devices]) -> int:
        """Jobs ahead that could take these devices, but for those that start elsewhere now."""
        here = {have.id for have in able}
        away = {start.job for start in decided.start if start.leases[0][0] not in here}
        known: dict[tuple[object, ...], bool] = {}

        def accepts(want: Candidate) -> bool:
            key = asked(want)
            if key not in known:
                known[key] = any(not refusal(want, have, EVER) for have in able)
            return known[key]

        return sum(job.id not in away and any(map(accepts, job.candidates)) for job in self._ahead)


def _option(index: int, want: Candidate, devices: Iterable[Devices]) -> Option:
    """What it would get there at most."""
    largest = sorted(devices, key=lambda have: -have.total)[: want.nodes]
    return Option(index, largest[0].total if want.exclusive else min(want.count, largest[-1].total), tuple(largest))
