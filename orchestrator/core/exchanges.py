"""Moves that pay, and who makes room for them: jobs that run exchange their places where one gains more by that than
the others lose.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from orchestrator.core.capacity import Room
from orchestrator.core.durations import told_s
from orchestrator.core.expected_duration import Expected, restart_s
from orchestrator.core.model import Running, Snapshot
from orchestrator.core.moves import fullest, movable, nodes_at, pays
from orchestrator.core.placement_slots import Place
from orchestrator.core.planner.job_order import Leave

SAME = Expected(0.0, known=True)
"""Of one that goes on beside where it is: it only starts again."""


@dataclass(frozen=True, slots=True)
class Move:
    """To devices on `nodes` (devices ids), once `victims` have stopped."""

    leave: Leave
    nodes: tuple[str, ...]
    victims: tuple[Leave, ...] = ()


def worth(leaves: Mapping[str, Leave], seen: Snapshot, room: Room) -> Iterator[Move]:
    """Moves that pay: the largest gain first, and those that another one makes possible. The caller carries each out
    before it asks for the next.
    """
    left = [leave for leave in leaves.values() if leave.attempt.job in room.running and pays(leave, seen)]
    left.sort(key=lambda leave: (leave.there.seconds - leave.here.seconds, leave.attempt.job))
    while found := next((move for leave in left if (move := _move(leave, leaves, seen, room))), None):
        left = [leave for leave in left if leave is not found.leave and leave not in found.victims]
        yield found


def _move(leave: Leave, leaves: Mapping[str, Leave], seen: Snapshot, room: Room) -> Move | None:
    """Where too few devices are free, others make room that the decision would have elsewhere, and where enough are
    free, but not together, others that stay nearby; if all of them lose less time than this one saves.
    """
    assert leave.place is not None
    promised = {have.id: room.promised(have.id) for have in nodes_at(leave.place.island, room)}
    _count(promised, leave.attempt, 1)
    if nodes := fullest(leave.place, promised):
        return Move(leave, tuple(nodes))
    could = [*leaves.values(), *_stay_nearby(leave.place, leaves, promised, seen, room)]
    others = [other for other in could if other is not leave and _makes_room(other, leave, promised, room)]
    victims = _fewest(leave, others, promised, seen)
    lost_s = sum(_lost_s(victim, leave, seen) for victim in victims)
    if not victims or not pays(leave, seen, lost_s):
        return None
    return Move(leave, tuple(fullest(leave.place, promised)), tuple(victims))


def _stay_nearby(
    place: Place, leaves: Mapping[str, Leave], promised: Mapping[str, int], seen: Snapshot, room: Room
) -> Iterator[Leave]:
    """The smaller ones that could go on on other nodes of the same island, where enough devices are free in all."""
    if sum(promised.values()) < place.devices:
        return
    for attempt in movable(seen, room):
        devices = sum(len(numbers) for _, numbers in attempt.leases)
        if attempt.job not in leaves and len(attempt.leases) == 1 and devices < place.count:
            yield Leave(attempt, replace(place, count=devices, nodes=1), SAME, SAME)


def _makes_room(other: Leave, leave: Leave, promised: Mapping[str, int], room: Room) -> bool:
    equal = other.attempt.priority == leave.attempt.priority and other.attempt.job in room.running
    return equal and any(devices_id in promised for devices_id, _ in other.attempt.leases)


def _fewest(leave: Leave, others: list[Leave], promised: dict[str, int], seen: Snapshot) -> list[Leave]:
    """Of which none can be spared, those that lose most first; [] where not even all are enough. `promised` then has
    what they give.
    """
    assert leave.place is not None
    for other in others:
        _count(promised, other.attempt, 1)
    if not fullest(leave.place, promised):
        return []
    victims = list(others)
    for other in sorted(others, key=lambda other: (-_lost_s(other, leave, seen), other.attempt.job)):
        _count(promised, other.attempt, -1)
        if fullest(leave.place, promised):
            victims.remove(other)
        else:
            _count(promised, other.attempt, 1)
    return victims


def _lost_s(other: Leave, leave: Leave, seen: Snapshot) -> float:
    """By its restart, and until it goes on in its place again, or at the one the decision has for it."""
    waits_s = leave.there.seconds
    if other.place is not None and other.here.known and other.there.known:
        waits_s = min(waits_s, max(0.0, other.there.seconds - other.here.seconds))
    return restart_s(other.attempt.job, seen) + waits_s


def _count(promised: dict[str, int], attempt: Running, sign: int) -> None:
    for devices_id, numbers in attempt.leases:
        if devices_id in promised:
            promised[devices_id] += sign * len(numbers)


def makes_room(victim: Leave, move: Move, seen: Snapshot) -> str:
    """Why it stops for a job that runs elsewhere."""
    job, place = move.leave.attempt.job, move.leave.place
    assert place is not None
    told = f"makes way on {', '.join(move.nodes)} for {job} of the same priority, which ends there"
    saved_s = move.leave.here.seconds - move.leave.there.seconds
    lost_s = _lost_s(victim, move.leave, seen)
    return f"{told} about {told_s(saved_s)} earlier, and costs this one about {told_s(lost_s)}"
