"""Decide which running jobs may be stopped or moved for a better use of the fleet, and give the reason.

Only trainings are stopped or moved that have a checkpoint, have run for longer than their restart costs, may be
preempted, and have no limit of interruptions. One stops for a job of the same priority if the policy gains more by that
than it costs, and moves if it would then end earlier by more than the move takes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.core.jobs.expected_duration import Expect, ExpectedDuration, in_state_s, restart_s
from orchestrator.core.model import Devices, Job, Running, Snapshot, TpuSlice
from orchestrator.core.placement_slots import Island, Place, PlaceReservation
from orchestrator.core.plan.assignment.job_order import LeavingJob
from orchestrator.core.plan.options.backfill import Reservation
from orchestrator.core.plan.options.capacity import FreeCapacity
from orchestrator.core.timing import duration_text

RESERVATION_S = 300.0
"""Seconds that devices stay reserved for a job that moves to them, or for which others save and stop."""

STRETCH, STARVES_S, DRAINS = 10.0, 1800.0, 2.0
"""A job starves, and then moves to the head of the queue, if it has waited longer than STRETCH times its duration, than
STARVES_S, and than DRAINS times what all waiting jobs up to its size would take together. If all have to wait long,
none starves.
"""

MIN_RUN_FACTOR = 2.0
"""A job may move only after this many times the cost of its restart."""

MIN_GAIN = 0.1
"""Least fraction of a job's remaining time that a move has to save beyond its cost."""


def current_reservations(snapshot: Snapshot) -> dict[str, PlaceReservation]:
    """Return reservations that are still needed: not expired, and the job still requests such devices."""
    if not snapshot.memory.reserved:
        return {}
    jobs = [*snapshot.jobs, *(r.spec for r in snapshot.running if r.stopping and r.spec)]
    pairs = ((job, snapshot.memory.reserved.get(job.id)) for job in jobs)
    return {
        job.id: reserved
        for job, reserved in pairs
        if reserved and snapshot.now_s < reserved.until_s and _still_requests(job, reserved.place)
    }


def _still_requests(job: Job, place: Place) -> bool:
    if place.candidate >= len(job.candidates):
        return False
    want = job.candidates[place.candidate]
    return want.nodes == place.nodes and (want.exclusive or place.count in want.counts)


def reserve_for_moving(snapshot: Snapshot, reserved: Mapping[str, PlaceReservation], capacity: FreeCapacity) -> None:
    """Reserve the next places of jobs that are still saving before a move, since these are not in the queue."""
    for attempt in snapshot.running:
        if attempt.stopping and attempt.spec and (reservation := reserved.get(attempt.job)):
            want = attempt.spec.candidates[reservation.place.candidate]
            capacity.quota.reserve_more(attempt.spec, reservation.place.island.kind, reservation.place.devices, attempt)
            available = {
                have.id: capacity.available_soon(have.id) for have in nodes_at(reservation.place.island, capacity)
            }
            for devices_id in fullest(reservation.place, available, capacity):
                capacity.reserve(attempt.job, want, devices_id, reservation.place.count)


def nodes_at(island: Island, capacity: FreeCapacity) -> Iterator[Devices]:
    for have in capacity.devices.values():
        if have.schedulable and Island(have.pool, have.kind, have.backend, have.environment) == island:
            yield have


def fullest(place: Place, available: Mapping[str, int], capacity: FreeCapacity) -> list[str]:
    """Return the tightest nodes with enough devices free or freeing for `place`; [] if there are too few nodes.

    Several hosts of a TPU slice are all of one slice.
    """
    suitable = sorted((count, devices_id) for devices_id, count in available.items() if count >= place.count)
    groups: dict[TpuSlice | None, list[str]] = {}
    for _, devices_id in suitable:
        tpu_slice = capacity.devices[devices_id].tpu_slice if place.nodes > 1 else None
        groups.setdefault(tpu_slice and replace(tpu_slice, worker=0), []).append(devices_id)
    return next((ids[: place.nodes] for ids in groups.values() if len(ids) >= place.nodes), [])


def is_starving(job: Job, snapshot: Snapshot, expect: Expect, drains_s: Sequence[float] = ()) -> bool:
    """Return True if the job has waited too long. `drains_s` as in Memory."""
    waited_s = in_state_s(job.id, snapshot)
    if waited_s <= STARVES_S:
        return False
    want = job.candidates[0]
    devices = want.min_count * want.nodes
    runs_s = expect(job, want.kinds[0], devices).seconds
    drain_s = drains_s[min(int(runs_s * devices).bit_length(), len(drains_s) - 1)] if drains_s else 0.0
    return waited_s > max(STRETCH * runs_s, DRAINS * drain_s)


def movable_attempts(snapshot: Snapshot, capacity: FreeCapacity) -> list[Running]:
    return [r for r in capacity.running.values() if not r.stopping and _may_move(r, snapshot)]


def _may_move(attempt: Running, snapshot: Snapshot) -> bool:
    job = attempt.spec
    if job is None or job.task != "train" or not (attempt.saves and attempt.preemptible):
        return False
    return job.recovery.max_interruptions < 0 and in_state_s(job.id, snapshot) >= MIN_RUN_FACTOR * restart_s(
        job.id, snapshot
    )


@dataclass(frozen=True, slots=True)
class LeavingJobs:
    """Running jobs that others of the same priority may stop: the decision places them elsewhere or not at all."""

    by_job: Mapping[str, LeavingJob] = field(default_factory=dict)

    def up_to(self, priority: int) -> frozenset[str]:
        """Return jobs up to this priority; a job that has aged into a higher tier stops no job of that tier."""
        return frozenset(job for job, leave in self.by_job.items() if leave.attempt.priority <= priority)

    def reasons(self, job: Job, reservation: Reservation, expect: Expect) -> dict[str, str]:
        """Return the reasons for attempts that stop for a job of the same priority, by job."""
        if not reservation.victims:
            return {}
        kind = reservation.nodes[0].partition("/")[2]
        left = expect(job, kind, reservation.count * len(reservation.nodes))
        return {
            victim.job: _stop_reason(self.by_job[victim.job], job, reservation, left)
            for victim in reservation.victims
            if victim.job in self.by_job and victim.priority == job.priority
        }


NO_LEAVING_JOBS = LeavingJobs()


def _stop_reason(leave: LeavingJob, job: Job, reservation: Reservation, remaining: ExpectedDuration) -> str:
    why = f"stops on {', '.join(reservation.nodes)} for {job.id} of the same priority, which gains more from them"
    theirs = (
        f"{duration_text(remaining.seconds)} left of {job.id}"
        if remaining.has_evidence
        else f"the duration of {job.id} is unknown"
    )
    return f"{why}: {theirs}, {duration_text(leave.here.seconds)} left of this job"


def is_worth_moving(leave: LeavingJob, snapshot: Snapshot, others_s: float = 0.0) -> bool:
    """Return True if both durations are known and the move saves more time than it costs this job and others."""
    if leave.place is None or not (leave.here.has_evidence and leave.there.has_evidence):
        return False
    costs_s = restart_s(leave.attempt.job, snapshot)
    saved_s = leave.here.seconds - leave.there.seconds - costs_s - others_s
    return saved_s > max(costs_s, MIN_GAIN * leave.here.seconds)


def move_reason(leave: LeavingJob, snapshot: Snapshot) -> str:
    place = leave.place
    assert place is not None
    costs_s = restart_s(leave.attempt.job, snapshot)
    where = f"{place.devices} {place.island.kind} in pool {place.island.pool}"
    saving = f"about {duration_text(leave.there.seconds)} are left there, {duration_text(leave.here.seconds)} here"
    return f"moves to {where}: {saving}, and the move costs about {duration_text(costs_s)}"
