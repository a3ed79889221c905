"""Find moves of running jobs that save time, and the jobs that stop for them.

Running jobs exchange places if one gains more time by that than the others lose.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from orchestrator.core.jobs.expected_duration import ExpectedDuration, restart_s
from orchestrator.core.model import Running, Snapshot
from orchestrator.core.placement_slots import Place
from orchestrator.core.plan.assignment.job_order import LeavingJob
from orchestrator.core.plan.moves import fullest, is_worth_moving, movable_attempts, nodes_at
from orchestrator.core.plan.options.capacity import FreeCapacity
from orchestrator.core.timing import duration_text

UNCHANGED = ExpectedDuration(0.0, has_evidence=True)
"""Expected difference for a job that moves to other nodes of its island: it only has to start again."""


@dataclass(frozen=True, slots=True)
class Move:
    """Move of a job to devices on `nodes` (devices ids), after `victims` have stopped."""

    leave: LeavingJob
    nodes: tuple[str, ...]
    victims: tuple[LeavingJob, ...] = ()


def profitable_moves(leaves: Mapping[str, LeavingJob], snapshot: Snapshot, capacity: FreeCapacity) -> Iterator[Move]:
    """Yield moves that save time, the largest gain first, and moves that they make possible.

    The caller applies each move to `capacity` before it requests the next.
    """
    left = [
        leave for leave in leaves.values() if leave.attempt.job in capacity.running and is_worth_moving(leave, snapshot)
    ]
    left.sort(key=lambda leave: (leave.there.seconds - leave.here.seconds, leave.attempt.job))
    while best := next((move for leave in left if (move := _move(leave, leaves, snapshot, capacity))), None):
        left = [leave for leave in left if leave is not best.leave and leave not in best.victims]
        yield best


def _move(
    leave: LeavingJob, leaves: Mapping[str, LeavingJob], snapshot: Snapshot, capacity: FreeCapacity
) -> Move | None:
    """Return the move of one job, or None if it does not save time.

    If too few devices are free, jobs stop that the decision places elsewhere. If enough are free, but not on the same
    nodes, jobs that can stay in the island stop, too. All of them together must lose less time than this job saves.
    """
    assert leave.place is not None
    available = {have.id: capacity.available_soon(have.id) for have in nodes_at(leave.place.island, capacity)}
    _count(available, leave.attempt, 1)
    if nodes := fullest(leave.place, available, capacity):
        return Move(leave, tuple(nodes))
    possible = [*leaves.values(), *_movable_nearby(leave.place, leaves, available, snapshot, capacity)]
    others = [
        other for other in possible if other is not leave and _can_free_devices(other, leave, available, capacity)
    ]
    victims = _minimal_victims(leave, others, available, snapshot, capacity)
    lost_s = sum(_lost_s(victim, leave, snapshot) for victim in victims)
    if not victims or not is_worth_moving(leave, snapshot, lost_s):
        return None
    return Move(leave, tuple(fullest(leave.place, available, capacity)), tuple(victims))


def _movable_nearby(
    place: Place,
    leaves: Mapping[str, LeavingJob],
    available: Mapping[str, int],
    snapshot: Snapshot,
    capacity: FreeCapacity,
) -> Iterator[LeavingJob]:
    """Yield smaller jobs that could continue on other nodes of the island, if it has enough free devices in total."""
    if sum(available.values()) < place.devices:
        return
    for attempt in movable_attempts(snapshot, capacity):
        devices = sum(len(numbers) for _, numbers in attempt.allocation)
        if attempt.job not in leaves and len(attempt.allocation) == 1 and devices < place.count:
            yield LeavingJob(attempt, replace(place, count=devices, nodes=1), UNCHANGED, UNCHANGED)


def _can_free_devices(
    other: LeavingJob, leave: LeavingJob, available: Mapping[str, int], capacity: FreeCapacity
) -> bool:
    is_equal = other.attempt.priority == leave.attempt.priority and other.attempt.job in capacity.running
    return is_equal and any(devices_id in available for devices_id, _ in other.attempt.allocation)


def _minimal_victims(
    leave: LeavingJob,
    others: list[LeavingJob],
    available: dict[str, int],
    snapshot: Snapshot,
    capacity: FreeCapacity,
) -> list[LeavingJob]:
    """Return a minimal set of jobs to stop, or [] if stopping all is not enough. Jobs that lose most are left first.

    The devices of the result have been added to `available`.
    """
    assert leave.place is not None
    for other in others:
        _count(available, other.attempt, 1)
    if not fullest(leave.place, available, capacity):
        return []
    victims = list(others)
    for other in sorted(others, key=lambda other: (-_lost_s(other, leave, snapshot), other.attempt.job)):
        _count(available, other.attempt, -1)
        if fullest(leave.place, available, capacity):
            victims.remove(other)
        else:
            _count(available, other.attempt, 1)
    return victims


def _lost_s(other: LeavingJob, leave: LeavingJob, snapshot: Snapshot) -> float:
    """Return the time that a job loses: its restart, and the wait for its old place or its decided one."""
    waits_s = leave.there.seconds
    if other.place is not None and other.here.has_evidence and other.there.has_evidence:
        waits_s = min(waits_s, max(0.0, other.there.seconds - other.here.seconds))
    return restart_s(other.attempt.job, snapshot) + waits_s


def _count(available: dict[str, int], attempt: Running, sign: int) -> None:
    for devices_id, numbers in attempt.allocation:
        if devices_id in available:
            available[devices_id] += sign * len(numbers)


def exchange_reason(victim: LeavingJob, move: Move, snapshot: Snapshot) -> str:
    """Say why a job stops for one that now runs elsewhere."""
    job, place = move.leave.attempt.job, move.leave.place
    assert place is not None
    why = f"stops on {', '.join(move.nodes)} for {job} of the same priority, which ends there"
    saved_s = move.leave.here.seconds - move.leave.there.seconds
    lost_s = _lost_s(victim, move.leave, snapshot)
    return f"{why} about {duration_text(saved_s)} earlier; this job loses about {duration_text(lost_s)}"
