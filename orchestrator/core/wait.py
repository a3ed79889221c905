"""What a job that does not fit now waits for, so that smaller jobs cannot starve it, and whom it may push aside.

The rule is simple on purpose. A blocked job claims one place that could serve it, and what it needs there is set aside:
no job after it in the policy's order takes those devices. The place with the fewest missing devices is claimed. Only
jobs ahead of it take from a place that is set aside, so the number missing falls with every attempt that ends there: a
gang at the head of the line starts, however many small jobs come after it. Only attempts of strictly lower priority are
asked to stop, only where that makes the job fit, and none that could have been spared.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.core.fit import EVER, node_takes_jobs, refusal
from orchestrator.core.gang import islands
from orchestrator.core.model import Candidate, Devices, Job, Preempt, Running
from orchestrator.core.room import Room
from orchestrator.core.score import rank

ABLE = (*EVER, node_takes_jobs)


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
        able = (have for have in room.devices.values() if not refusal(want, have, ABLE))
        for nodes in islands(able).values():
            if len(nodes) >= want.nodes:
                yield _claim_in(index, want, job, nodes, room)


def _claim_in(index: int, want: Candidate, job: Job, nodes: list[Devices], room: Room) -> Claim:
    lower = [r for r in room.running.values() if r.priority < job.priority and r.preemptible]
    victims = _fewest_victims(want, nodes, lower, room)
    gains = _gains(victims)
    promised = {have.id: room.promised(have.id) + gains.get(have.id, 0) for have in nodes}
    fullest = sorted(nodes, key=lambda d: (-min(promised[d.id], want.min_count), d.total, d.id))[: want.nodes]
    missing = sum(max(0, want.min_count - promised[have.id]) for have in fullest)
    return Claim(index, want.min_count, tuple(have.id for have in fullest), tuple(victims), missing)


def _fewest_victims(want: Candidate, nodes: list[Devices], lower: list[Running], room: Room) -> list[Running]:
    """A set of which none can be spared, or nobody when stopping all would not help.

    Spared first: higher priority, then longer running, then the name.
    """
    victims = sorted(lower, key=lambda r: (-r.priority, r.started_s, r.job))
    if not _enough(want, nodes, victims, room):
        return []
    for spared in list(victims):
        rest = [victim for victim in victims if victim is not spared]
        if _enough(want, nodes, rest, room):
            victims = rest
    return victims


def _enough(want: Candidate, nodes: list[Devices], victims: list[Running], room: Room) -> bool:
    gains = _gains(victims)
    full = sum(room.promised(have.id) + gains.get(have.id, 0) >= want.min_count for have in nodes)
    return full >= want.nodes


def _gains(victims: list[Running]) -> dict[str, int]:
    gains: dict[str, int] = {}
    for victim in victims:
        for devices_id, numbers in victim.leases:
            gains[devices_id] = gains.get(devices_id, 0) + len(numbers)
    return gains


def _order(job: Job, claimed: Claim) -> tuple[Any, ...]:
    """Nothing to stop and nothing missing; then the cheapest victims; then the fewest missing devices."""
    priorities = sorted((victim.priority for victim in claimed.victims), reverse=True)
    return (claimed.missing, priorities, rank(job, claimed.candidate), claimed.nodes, claimed.candidate)
