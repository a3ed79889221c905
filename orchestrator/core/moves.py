"""Which running jobs may be stopped or moved for a better use of the fleet, when that pays, and what it is called.

Only a training that has a checkpoint is touched, that has run for longer than its start took, and whose user does not
count its interruptions. It stops for an equal where the policy gains more by that than it costs, and it moves where it
would end earlier by more than the move takes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.core.backfill import Claim
from orchestrator.core.capacity import Room
from orchestrator.core.durations import told_s
from orchestrator.core.expected_duration import Expect, Expected, in_state_s, restart_s
from orchestrator.core.model import Devices, Job, Running, Snapshot
from orchestrator.core.placement_slots import Island, Place, Reserved
from orchestrator.core.planner.job_order import Leave

KEPT_S = 300.0
"""So long devices are kept for a job that is on its way to them, or for which others save and stop."""

STRETCH, STARVES_S, DRAINS = 10.0, 1800.0, 2.0
"""A job goes first that has waited for so many times as long as it runs, for so many seconds at least, and for so many
times as long as all that waits and is no larger would take: where all have to wait long, none of them starves.
"""

SETTLED = 2.0
"""Of the time a job needs for a start: it is left where it is for so long."""

GAIN = 0.1
"""Of what is left of a job, the least that a move has to save beyond its cost."""


def still(seen: Snapshot) -> dict[str, Reserved]:
    """What was reserved, and is needed yet. A user may have asked for other devices meanwhile."""
    if not seen.memory.reserved:
        return {}
    jobs = [*seen.jobs, *(r.asked for r in seen.running if r.stopping and r.asked)]
    kept = ((job, seen.memory.reserved.get(job.id)) for job in jobs)
    return {
        job.id: reserved
        for job, reserved in kept
        if reserved and seen.now_s < reserved.until_s and _asks_for(job, reserved.place)
    }


def _asks_for(job: Job, place: Place) -> bool:
    if place.candidate >= len(job.candidates):
        return False
    want = job.candidates[place.candidate]
    return want.nodes == place.nodes and (want.exclusive or place.count in want.counts)


def keep_for_those_that_stop(seen: Snapshot, reserved: Mapping[str, Reserved], room: Room) -> None:
    """A job that still saves before it moves is in no line: nobody else takes its next place meanwhile."""
    for attempt in seen.running:
        if attempt.stopping and attempt.asked and (kept := reserved.get(attempt.job)):
            want = attempt.asked.candidates[kept.place.candidate]
            room.quota.keep_more(attempt.asked, kept.place.island.kind, kept.place.devices, attempt)
            promised = {have.id: room.promised(have.id) for have in nodes_at(kept.place.island, room)}
            for devices_id in fullest(kept.place, promised):
                room.keep(attempt.job, want, devices_id, kept.place.count)


def nodes_at(island: Island, room: Room) -> Iterator[Devices]:
    for have in room.devices.values():
        if have.schedulable and Island(have.pool, have.kind, have.backend, have.environment) == island:
            yield have


def fullest(place: Place, promised: Mapping[str, int]) -> list[str]:
    """The nodes on which so many devices are free, or will be: those with the fewest more; [] where there are not
    enough of them.
    """
    able = sorted((count, devices_id) for devices_id, count in promised.items() if count >= place.count)
    return [devices_id for _, devices_id in able[: place.nodes]] if len(able) >= place.nodes else []


def starves(job: Job, seen: Snapshot, expect: Expect, drains_s: Sequence[float] = ()) -> bool:
    """`drains_s` as Memory has them."""
    waited_s = in_state_s(job.id, seen)
    if waited_s <= STARVES_S:
        return False
    want = job.candidates[0]
    devices = want.min_count * want.nodes
    runs_s = expect(job, want.kinds[0], devices).seconds
    drain_s = drains_s[min(int(runs_s * devices).bit_length(), len(drains_s) - 1)] if drains_s else 0.0
    return waited_s > max(STRETCH * runs_s, DRAINS * drain_s)


def movable(seen: Snapshot, room: Room) -> list[Running]:
    return [r for r in room.running.values() if not r.stopping and _may_move(r, seen)]


def _may_move(attempt: Running, seen: Snapshot) -> bool:
    job = attempt.asked
    if job is None or job.task != "train" or not (attempt.saves and attempt.preemptible):
        return False
    return job.recovery.max_interruptions < 0 and in_state_s(job.id, seen) >= SETTLED * restart_s(job.id, seen)


@dataclass(frozen=True, slots=True)
class Leaves:
    """Running jobs that equals may stop now: the decision would have them elsewhere, or nowhere for now."""

    by_job: Mapping[str, Leave] = field(default_factory=dict)

    def up_to(self, priority: int) -> frozenset[str]:
        """A job that has aged into a higher tier stops nobody of it."""
        return frozenset(job for job, leave in self.by_job.items() if leave.attempt.priority <= priority)

    def sentences(self, job: Job, claimed: Claim, expect: Expect) -> dict[str, str]:
        """Why each of those that stop for an equal does, by job."""
        if not claimed.victims:
            return {}
        kind = claimed.nodes[0].partition("/")[2]
        left = expect(job, kind, claimed.count * len(claimed.nodes))
        return {
            victim.job: _makes_way(self.by_job[victim.job], job, claimed, left)
            for victim in claimed.victims
            if victim.job in self.by_job and victim.priority == job.priority
        }


NOBODY = Leaves()


def _makes_way(leave: Leave, job: Job, claimed: Claim, left: Expected) -> str:
    told = f"makes way on {', '.join(claimed.nodes)} for {job.id} of the same priority, to which they are worth more"
    theirs = f"{told_s(left.seconds)} left of that one" if left.known else "it is not known how long that one takes"
    return f"{told}: {theirs}, {told_s(leave.here.seconds)} left of this"


def pays(leave: Leave, seen: Snapshot, others_s: float = 0.0) -> bool:
    """Both ends are known, and it ends earlier by more than the move costs, and others lose by it."""
    if leave.place is None or not (leave.here.known and leave.there.known):
        return False
    costs_s = restart_s(leave.attempt.job, seen)
    saved_s = leave.here.seconds - leave.there.seconds - costs_s - others_s
    return saved_s > max(costs_s, GAIN * leave.here.seconds)


def sentence(leave: Leave, seen: Snapshot) -> str:
    place = leave.place
    assert place is not None
    costs_s = restart_s(leave.attempt.job, seen)
    where = f"{place.devices} {place.island.kind} in pool {place.island.pool}"
    told = f"there about {told_s(leave.there.seconds)} are left of it, here {told_s(leave.here.seconds)}"
    return f"moves to {where}: {told}, and the move costs about {told_s(costs_s)}"
