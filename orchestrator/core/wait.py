"""What a job that does not fit now waits for, so that smaller jobs cannot starve it, and whom it may push aside.

The rule is simple on purpose. A blocked job claims one place that could serve it, and what it needs there is set aside:
no job after it in the policy's order takes those devices. The place with the fewest missing devices is claimed. Only
jobs ahead of it take from a place that is set aside, so the number missing falls with every attempt that ends there: a
gang at the head of the line starts, however many small jobs come after it. Only attempts of strictly lower priority are
asked to stop, only where that makes the job fit, and none that could have been spared. A job in a pause after a failure
claims nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.core.fit import least, other_vendor
from orchestrator.core.model import Candidate, Devices, Job, Preempt, Running
from orchestrator.core.room import Room
from orchestrator.core.score import rank


@dataclass(frozen=True, slots=True)
class Claim:
    """`count` devices on each of `nodes` (devices ids) for candidate number `candidate`, once `victims` have stopped.

    `missing` devices are neither free nor about to be, with the victims gone.
    """

    candidate: int
    count: int
    nodes: tuple[str, ...]
    victims: tuple[Running, ...]
    missing: int


def claim(job: Job, room: Room) -> Claim | None:
    """The place this job waits for; None when no node that takes jobs could ever hold it."""
    return min(_claims(job, room), key=lambda c: _order(job, c), default=None)


def apply(job: Job, claimed: Claim, room: Room) -> list[Preempt]:
    """Set the claimed devices aside; the attempts to stop for it."""
    for victim in claimed.victims:
        room.stop(victim)
    for devices_id in claimed.nodes:
        room.keep(job.id, devices_id, claimed.count)
    why = f"{job.id} (priority {job.priority}) needs {claimed.count} of {', '.join(claimed.nodes)}"
    return [Preempt(victim.job, job.id, why) for victim in claimed.victims]


def sentence(claimed: Claim) -> str:
    """What `explain` says beside the refusals of single devices."""
    where = ", ".join(claimed.nodes)
    if claimed.victims:
        return f"waits for {', '.join(v.job for v in claimed.victims)} of lower priority to save and stop on {where}"
    if not claimed.missing:
        return f"waits for attempts that are stopping on {where}"
    needed = claimed.count * len(claimed.nodes)
    if claimed.missing == needed:
        return f"waits for {needed} device{'s' if needed > 1 else ''} on {where}"
    return f"waits for {claimed.missing} of {needed} devices on {where}; no later job takes the others"


def _claims(job: Job, room: Room) -> Iterator[Claim]:
    for index, want in enumerate(job.candidates):
        for ids in room.places(index, want).islands.values():
            nodes = [room.devices[devices_id] for devices_id in ids]
            if len(nodes) >= want.nodes and not other_vendor(job, nodes[0]):  # an island has one vendor
                yield _claim_in(index, want, job, nodes, room)


def _claim_in(index: int, want: Candidate, job: Job, nodes: list[Devices], room: Room) -> Claim:
    need = least(want, nodes[0])  # the same on all nodes of an island
    promised = {have.id: room.promised(have.id) for have in nodes}
    lower = [r for r in room.running.values() if r.priority < job.priority and r.preemptible]
    victims = _fewest_victims(need, want.nodes, promised, lower)
    for victim in victims:
        _count(promised, victim, 1)
    fullest = sorted(nodes, key=lambda d: (-min(promised[d.id], need), d.total, d.id))[: want.nodes]
    missing = sum(max(0, need - promised[have.id]) for have in fullest)
    return Claim(index, need, tuple(have.id for have in fullest), tuple(victims), missing)


def _fewest_victims(need: int, nodes: int, promised: dict[str, int], lower: list[Running]) -> list[Running]:
    """A set of which none can be spared, or nobody when stopping all would not help.

    Spared first: higher priority, then submitted earlier, then the name.
    """
    here = [r for r in lower if any(devices_id in promised for devices_id, _ in r.leases)]
    left = dict(promised)
    for attempt in here:
        _count(left, attempt, 1)
    if not _enough(need, nodes, left):
        return []
    victims = []
    for attempt in sorted(here, key=lambda r: (-r.priority, r.order, r.job)):
        _count(left, attempt, -1)
        if not _enough(need, nodes, left):
            _count(left, attempt, 1)
            victims.append(attempt)
    return victims


def _enough(need: int, nodes: int, promised: dict[str, int]) -> bool:
    return sum(count >= need for count in promised.values()) >= nodes


def _count(promised: dict[str, int], attempt: Running, sign: int) -> None:
    """Add (or take away, for -1) what nodes would gain if `attempt` stopped."""
    for devices_id, numbers in attempt.leases:
        if devices_id in promised:
            promised[devices_id] += sign * len(numbers)


def _order(job: Job, claimed: Claim) -> tuple[Any, ...]:
    """Nothing to stop and nothing missing; then the cheapest victims; then the fewest missing devices."""
    priorities = sorted((victim.priority for victim in claimed.victims), reverse=True)
    return (claimed.missing, priorities, rank(job, claimed.candidate), claimed.nodes, claimed.candidate)
