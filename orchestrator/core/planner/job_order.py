"""Whose turn it is among the jobs of one tier, and where: what the decision on arrays says, in words of the plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from orchestrator.core.capacity import Room
from orchestrator.core.expected_duration import Expect, Expected
from orchestrator.core.model import Job, Running, Snapshot
from orchestrator.core.placement_slots import Island, Memory, Place
from orchestrator.core.planner import decision
from orchestrator.core.planner.board import Board, board
from orchestrator.core.planner.planner_jobs import WAITS, Floats, Integers

FORGOTTEN = 0.5
"""Of each second: who came when much was waiting would not have been served before that either."""

SIZES = 40
"""Of jobs: up to 1, 2, 4, 8 ... device-seconds."""

BY_ITSELF = frozenset({"cost", "energy"})
"""Objectives with which a job chooses its place by itself, whatever the policy finds good for all."""


@dataclass(frozen=True, slots=True)
class Leave:
    """A running job that the decision would have elsewhere: `place` None: nowhere for now. What is left of it `here`
    and `there`.
    """

    attempt: Running
    place: Place | None
    here: Expected
    there: Expected


@dataclass(frozen=True, slots=True)
class Turn:
    """`first` are the jobs that run now if all is placed as decided, `then` the others. `places` says where the first
    are, and `strictly` those of them that go nowhere else while that is possible: of others it is not known where they
    run faster. `leaves` by job. `memory`, `value` and `bound` as in a Plan. `nodes` by job: the devices ids that it
    gets where memory of machines is a limit.
    """

    first: tuple[Job, ...]
    then: tuple[Job, ...]
    places: Mapping[str, Place] = field(default_factory=dict)
    strictly: frozenset[str] = frozenset()
    leaves: Mapping[str, Leave] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    value: float = 0.0
    bound: float = 0.0
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def turn(
    seen: Snapshot,
    waiting: Iterable[Job],
    running: Iterable[Running],
    room: Room,
    tier: int,
    expect: Expect,
    full: bool = False,
) -> Turn:
    """`waiting` are in the order of submission. `running`: attempts that may be stopped or moved. `full`: prices are
    found anew, and not taken from the decision before.
    """
    waiting = tuple(waiting)
    lower = min((job.priority for job in waiting), default=tier)  # one that has aged stops nobody above its own
    columns = board(seen, waiting, running, room, lower, expect)
    warm = decision.Memory(
        _prices(seen.memory.work, columns.islands),
        {0: _prices(seen.memory.devices[tier], columns.islands)} if tier in seen.memory.devices else {},
    )
    decide = decision.decide if full or 0 not in warm.devices else decision.fill
    decided = decide(columns.work, columns.capacity, seen.policy, warm)
    memory = _remembered(seen.memory, columns.islands, decided.memory, tier, decided.fault)
    passed_s = max(0.0, seen.now_s - memory.drained_s)
    drains = {at: tuple(max(0.0, s - FORGOTTEN * passed_s) for s in told) for at, told in memory.drains_s.items()}
    now_s = _drains_s(columns, len(waiting), room, seen.policy == "makespan")
    drains[tier] = tuple(map(max, drains.get(tier, now_s), now_s))
    return _turn(columns, decided, replace(memory, drains_s=drains, drained_s=seen.now_s))


def _drains_s(columns: Board, queue: int, room: Room, together: bool) -> tuple[float, ...]:
    """What waits, each job where it takes least device time, over all devices that there are of these islands; of jobs
    up to each size. `together`: it is of no use to any that small ones end before all do.
    """
    work, there = columns.work, set(columns.islands)
    each_s = (work.devices * work.remaining_s)[:, :queue]
    least_s = each_s.min(axis=0, initial=np.inf)
    least_s = least_s[np.isfinite(least_s)]
    sizes = np.ceil(np.log2(np.maximum(least_s, 1.0))).astype(np.int64)
    by_size = np.bincount(np.minimum(sizes, SIZES - 1), least_s, minlength=SIZES)
    devices = sum(
        have.total
        for have in room.devices.values()
        if have.schedulable and Island(have.pool, have.kind, have.backend, have.environment) in there
    )
    told = np.cumsum(by_size) / max(devices, 1)
    return (float(told[-1]),) * SIZES if together else tuple(told.tolist())


def _prices(known: Mapping[Island, float], islands: tuple[Island, ...]) -> Floats:
    """Of islands that are new as of the others in the mean; none where nothing is known."""
    if not known or not islands:
        return np.zeros(0)
    mean = sum(known.values()) / len(known)
    return np.array([known.get(island, mean) for island in islands])


def _remembered(before: Memory, islands: tuple[Island, ...], now: decision.Memory, tier: int, fault: str) -> Memory:
    work = dict(zip(islands, now.work.tolist(), strict=False))
    devices = dict(before.devices)
    if islands and 0 in now.devices:
        devices[tier] = dict(zip(islands, now.devices[0].tolist(), strict=False))
    return replace(before, work={**before.work, **work}, devices=devices, fault=fault or before.fault)


def _turn(columns: Board, decided: decision.Decision, memory: Memory) -> Turn:
    queue = len(columns.jobs) - len(columns.running)
    option = decided.option
    chosen = np.flatnonzero(option[:queue] != WAITS)
    sizes = columns.work.devices[option[chosen], chosen]
    first = chosen[np.argsort(-sizes, kind="stable")]  # large gangs find nodes while these are empty
    places = {columns.jobs[job].id: columns.place(job, int(option[job])) for job in chosen.tolist()}
    strictly = frozenset(columns.jobs[job].id for job in chosen.tolist() if _follows(columns, job))
    return Turn(
        tuple(columns.jobs[job] for job in first.tolist()),
        tuple(columns.jobs[job] for job in np.flatnonzero(option[:queue] == WAITS).tolist()),
        places,
        strictly,
        dict(_leaves(columns, option, queue)),
        memory,
        decided.value,
        decided.bound,
        {
            columns.jobs[job].id: tuple(columns.nodes[node] for node in nodes)
            for job, nodes in decided.nodes.items()
            if job < queue
        },
    )


def _follows(columns: Board, column: int) -> bool:
    """Whether the job goes where the decision says: its user has not said more, and the places are told apart."""
    job = columns.jobs[column]
    return columns.known[column] and not job.ordered and job.objective not in BY_ITSELF


def _leaves(columns: Board, option: Integers, queue: int) -> Iterable[tuple[str, Leave]]:
    work = columns.work
    for column in np.flatnonzero(option != work.held).tolist():
        if column < queue:
            continue
        attempt, to = columns.running[column - queue], int(option[column])
        here = columns.expected(column, columns.place(column, int(work.held[column])))
        place = columns.place(column, to) if to != WAITS and _follows(columns, column) else None
        yield attempt.job, Leave(attempt, place, here, columns.expected(column, place) if place else here)
