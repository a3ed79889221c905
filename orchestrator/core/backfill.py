"""What a job that does not fit now waits for, so that smaller jobs cannot starve it, and whom it may push aside.

The rule is simple on purpose. A blocked job claims one place that could serve it, and what it needs there is set aside:
no job after it in the policy's order takes those devices. The place with the fewest missing devices is claimed. Only
jobs ahead of it take from a place that is set aside, so the number missing falls with every attempt that ends there: a
gang at the head of the line starts, however many small jobs come after it. Only attempts of strictly lower priority are
asked to stop, of the same one those that a full decision would have elsewhere (core/moves.py), and of any those that
run beyond the quota of their project for a job that has more right to it (core/quota.py); only where that
makes the job fit, and none that could have been spared. A job that lacks quota has attempts of its own project stop,
where they are of lower priority; else what is left of the quota is kept for it, and no devices are. A job in a pause
after a failure claims nothing.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.core.capacity import Room
from orchestrator.core.fit import least, other_vendor
from orchestrator.core.host_memory import Promised, machine
from orchestrator.core.model import Devices, Job, Preempt, Running
from orchestrator.core.placement_slots import Place
from orchestrator.core.score import rank

MAX_HOLDERS = 3
"""Jobs that hold devices are named up to so many."""


@dataclass(frozen=True, slots=True)
class Claim:
    """`count` devices on each of `nodes` (devices ids) for candidate number `candidate`, once `victims` have stopped.

    `missing` devices are neither free nor about to be, with the victims gone. `short_of` says which memory some of them
    lack, `elsewhere` what victims on other nodes hold.
    """

    candidate: int
    count: int
    nodes: tuple[str, ...]
    victims: tuple[Running, ...]
    missing: int
    short_of: str = ""
    elsewhere: str = ""


def claim(job: Job, room: Room, own: bool = False) -> Claim | None:
    """The place this job waits for; None when no node that takes jobs could ever hold it, or quota is lacking. `own`:
    attempts of its project may stop for it also where it may borrow.
    """
    return min(_claims(job, room, own), key=lambda c: _order(job, c), default=None)


def keep_quota(job: Job, room: Room) -> None:
    """For one that is too large for what is left of its project's quota: smaller ones do not take it meanwhile."""
    for index in sorted(range(len(job.candidates)), key=lambda index: rank(job, index)):
        want = job.candidates[index]
        for nodes in _islands(job, index, room):
            have = nodes[0]
            devices = least(want, have) * want.nodes
            if room.quota.refusal(job, devices, have.kind) and room.quota.could_ever(job, devices, have.kind):
                room.quota.keep(job, have.kind, devices)
                return


def claim_at(job: Job, place: Place, room: Room, equals: frozenset[str] = frozenset()) -> Claim | None:
    """At this one place; also jobs of `equals` may stop for it."""
    nodes = nodes_of(job, place, room)
    if len(nodes) < place.nodes or room.quota.refusal(job, place.devices, place.island.kind):
        return None
    return _claim_in(place.candidate, place.count, place.nodes, job, nodes, room, equals)


def could_stop(job: Job, room: Room, equals: frozenset[str] = frozenset()) -> bool:
    """Whether anybody may be asked to stop for it; cheap, and asked often."""
    return bool(equals or room.quota.borrowed or room.below(job.priority))


def nodes_of(job: Job, place: Place, room: Room) -> list[Devices]:
    """All that take jobs now and could be part of it."""
    want = job.candidates[place.candidate]
    islands = room.places(want).islands
    per_node = place.count if want.exclusive else 0
    ids = islands.get(replace(place.island, per_node=per_node), ())
    if not ids or other_vendor(job, room.devices[ids[0]]):  # an island has one vendor
        return []
    return [room.devices[devices_id] for devices_id in ids]


def apply(job: Job, claimed: Claim, room: Room, equals: Mapping[str, str] | None = None) -> list[Preempt]:
    """Set the claimed devices aside; the attempts to stop for it. `equals`: why those of the same priority do."""
    for victim in claimed.victims:
        room.stop(victim)
    for devices_id in claimed.nodes:
        room.keep(job.id, job.candidates[claimed.candidate], devices_id, claimed.count)
        kind = room.devices[devices_id].kind
        room.quota.keep(job, kind, claimed.count)
    why = f"{job.id} (priority {job.priority}) needs {claimed.count} of {', '.join(claimed.nodes)}"
    return [Preempt(victim.job, job.id, (equals or {}).get(victim.job, why)) for victim in claimed.victims]


def sentence(claimed: Claim, room: Room, equals: Collection[str] = ()) -> str:
    """What `explain` says beside the refusals of single devices."""
    where = ", ".join(claimed.nodes)
    if claimed.victims:
        lower = "" if any(victim.job in equals for victim in claimed.victims) else " of lower priority"
        if not all(any(devices_id in claimed.nodes for devices_id, _ in v.leases) for v in claimed.victims):
            lower += f", which hold {claimed.elsewhere},"
        return f"waits for {', '.join(v.job for v in claimed.victims)}{lower} to save and stop on {where}"
    if not claimed.missing:
        return f"waits for attempts that are stopping on {where}"
    if claimed.short_of:
        return f"waits for {claimed.short_of} on {where}"
    needed = claimed.count * len(claimed.nodes)
    if holders := room.holders(claimed.nodes):
        where += f", {held_by(holders)}"
    if claimed.missing == needed:
        return f"waits for {needed} device{'s' if needed > 1 else ''} on {where}"
    return f"waits for {claimed.missing} of {needed} devices on {where}; the others are reserved for it"


def held_by(jobs: list[str]) -> str:
    more = f" and {len(jobs) - MAX_HOLDERS} more" if len(jobs) > MAX_HOLDERS else ""
    return f"held by {', '.join(jobs[:MAX_HOLDERS])}{more}"


def _islands(job: Job, index: int, room: Room) -> Iterator[list[Devices]]:
    """Nodes that could hold candidate number `index` together; all of one kind and vendor."""
    want = job.candidates[index]
    for ids in room.places(want).islands.values():
        nodes = [room.devices[devices_id] for devices_id in ids]
        if len(nodes) >= want.nodes and not other_vendor(job, nodes[0]):
            yield nodes


def _claims(job: Job, room: Room, own: bool) -> Iterator[Claim]:
    for index, want in enumerate(job.candidates):
        for nodes in _islands(job, index, room):
            lacks_quota = room.quota.needs(job, want, nodes[0])
            if lacks_quota and room.quota.may_borrow(job) and not own:  # it gets what is idle first
                continue
            need = least(want, nodes[0])  # the same on all nodes of an island
            claimed = _claim_in(index, need, want.nodes, job, nodes, room)
            if not lacks_quota or room.quota.within(job, need * want.nodes, nodes[0].kind, claimed.victims):
                yield claimed


def _claim_in(
    index: int, need: int, count: int, job: Job, nodes: list[Devices], room: Room, equals: frozenset[str] = frozenset()
) -> Claim:
    """`need` devices on each of `count` of these nodes."""
    counts = {have.id: room.promised(have.id) for have in nodes}
    promised = Promised(job.candidates[index], nodes, counts, room.memory)
    kind = nodes[0].kind if nodes else ""
    victims = _Asked(job, need, count, kind, room).fewest_victims(promised, _may_stop(job, room, equals, kind))
    for victim in victims:
        promised.add(victim, 1)
    fullest = promised.fullest(nodes, need)[:count]
    missing = sum(need - gets for _, gets in fullest)
    short = [machine(have) for have, gets in fullest if promised.lacks_memory(have.id, need, gets)]
    short_of = f"memory of machine {short[0]}" if short else ""
    elsewhere = "memory of its machine" if all(map(promised.gains, victims)) else "the quota of its project"
    return Claim(index, need, tuple(have.id for have, _ in fullest), tuple(victims), missing, short_of, elsewhere)


def _may_stop(job: Job, room: Room, equals: frozenset[str], kind: str) -> list[Running]:
    """Of lower priority; equals that the decision would have elsewhere; and who has borrowed devices of such a kind."""
    lower = room.below(job.priority)
    others = (room.running[name] for name in sorted({*equals, *room.quota.borrowed}) if name in room.running)
    return [*lower, *(r for r in others if r.priority >= job.priority and _gives_way(r, job, room, equals, kind))]


def _gives_way(attempt: Running, job: Job, room: Room, equals: frozenset[str], kind: str) -> bool:
    equal = attempt.job in equals and attempt.preemptible and attempt.priority == job.priority
    return equal or room.quota.gives_back(attempt, job, kind)


@dataclass(frozen=True, slots=True)
class _Asked:
    """`need` devices on each of `nodes` nodes."""

    job: Job
    need: int
    nodes: int
    kind: str
    room: Room

    def fewest_victims(self, promised: Promised, lower: list[Running]) -> list[Running]:
        """A set of which none can be spared, or nobody when stopping all would not help.

        Spared first: higher priority, then submitted earlier, then the name.
        """
        here = [r for r in lower if self._helps(r, promised)]
        left, victims = promised.copy(), list(here)
        for attempt in here:
            left.add(attempt, 1)
        if not self._enough(left, victims):
            return []
        for attempt in sorted(here, key=lambda r: (-r.priority, r.order, r.job)):
            left.add(attempt, -1)
            victims.remove(attempt)
            if not self._enough(left, victims):
                left.add(attempt, 1)
                victims.append(attempt)
        return victims

    def _helps(self, attempt: Running, promised: Promised) -> bool:
        """By its devices, by its memory, or by the quota that it holds."""
        return promised.gains(attempt) or (self.room.quota.is_of(self.job, attempt, self.kind) and not self._within(()))

    def _enough(self, promised: Promised, victims: Collection[Running]) -> bool:
        return promised.nodes(self.need) >= self.nodes and self._within(victims)

    def _within(self, victims: Collection[Running]) -> bool:
        return self.room.quota.within(self.job, self.need * self.nodes, self.kind, victims)


def _order(job: Job, claimed: Claim) -> tuple[Any, ...]:
    """Nothing to stop and nothing missing; then the cheapest victims; then the fewest missing devices."""
    priorities = sorted((victim.priority for victim in claimed.victims), reverse=True)
    return (claimed.missing, priorities, rank(job, claimed.candidate), claimed.nodes, claimed.candidate)
