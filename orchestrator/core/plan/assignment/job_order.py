"""Order the jobs of one tier and choose their places: translate the decision on arrays into the plan's types."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from orchestrator.core.jobs.expected_duration import Expect, ExpectedDuration
from orchestrator.core.model import Job, Running, Snapshot
from orchestrator.core.placement_slots import Island, Place, PlanMemory
from orchestrator.core.plan.arrays.planner_jobs import WAITS, Floats, Integers
from orchestrator.core.plan.assignment import decision
from orchestrator.core.plan.assignment.board import Board, board
from orchestrator.core.plan.options.capacity import FreeCapacity

DRAIN_DECAY = 0.5
"""Seconds by which an earlier `drains_s` decays per second: jobs that came then have to wait for that work, too."""

SIZES = 40
"""Number of size classes of jobs: up to 1, 2, 4, 8 … device-seconds."""

OWN_CHOICE = frozenset({"cost", "energy"})
"""Objectives with which a job chooses its own place, whatever the policy decides."""


@dataclass(frozen=True, slots=True)
class LeavingJob:
    """Running job that the decision places elsewhere, or nowhere for now (`place` None).

    `here` and `there` are its expected remaining times.
    """

    attempt: Running
    place: Place | None
    here: ExpectedDuration
    there: ExpectedDuration


@dataclass(frozen=True, slots=True)
class TierDecision:
    """Decision for one tier.

    `first` are the jobs that run now if all are placed as decided, `then` the others. `places` has the places of
    `first`; `strict` are those of them that use no other place while theirs is possible. For the rest it is unknown
    where they run faster. `leaves` by job. `memory`, `value` and `bound` as in Plan. `nodes` by job: the devices ids
    that it gets where machines' memory is a limit.
    """

    first: tuple[Job, ...]
    then: tuple[Job, ...]
    places: Mapping[str, Place] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    leaves: Mapping[str, LeavingJob] = field(default_factory=dict)
    memory: PlanMemory = field(default_factory=PlanMemory)
    value: float = 0.0
    bound: float = 0.0
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def decide_tier(
    snapshot: Snapshot,
    waiting: Iterable[Job],
    running: Iterable[Running],
    capacity: FreeCapacity,
    tier: int,
    expect: Expect,
    full: bool = False,
) -> TierDecision:
    """Decide for one tier. `waiting` is in the order of submission, `running` are attempts that may stop or move.

    `full`: compute new prices instead of using those of the last decision.
    """
    waiting = tuple(waiting)
    # A job that has aged stops only attempts below its own priority.
    lower = min((job.priority for job in waiting), default=tier)
    arrays = board(snapshot, waiting, running, capacity, lower, expect)
    warm = decision.PriceMemory(
        _prices(snapshot.memory.work, arrays.islands),
        {0: _prices(snapshot.memory.devices[tier], arrays.islands)} if tier in snapshot.memory.devices else {},
    )
    decide = decision.decide if full or 0 not in warm.devices else decision.fill
    result = decide(arrays.work, arrays.capacity, snapshot.policy, warm)
    memory = _updated_memory(snapshot.memory, arrays.islands, result.memory, tier, result.fault)
    passed_s = max(0.0, snapshot.now_s - memory.drained_s)
    drains = {
        at: tuple(max(0.0, s - DRAIN_DECAY * passed_s) for s in previous) for at, previous in memory.drains_s.items()
    }
    now_s = _drains_s(arrays, len(waiting), capacity, snapshot.policy == "makespan")
    drains[tier] = tuple(map(max, drains.get(tier, now_s), now_s))
    return _to_tier_decision(arrays, result, replace(memory, drains_s=drains, drained_s=snapshot.now_s))


def _drains_s(arrays: Board, queue: int, capacity: FreeCapacity, together: bool) -> tuple[float, ...]:
    """Return, for jobs up to each size, how long all devices of these islands would take for the waiting ones.

    Each job counts with its least device time. `together`: small jobs do not benefit from ending before all others.
    """
    work, islands = arrays.work, set(arrays.islands)
    each_s = (work.devices * work.remaining_s)[:, :queue]
    least_s = each_s.min(axis=0, initial=np.inf)
    least_s = least_s[np.isfinite(least_s)]
    sizes = np.ceil(np.log2(np.maximum(least_s, 1.0))).astype(np.int64)
    by_size = np.bincount(np.minimum(sizes, SIZES - 1), least_s, minlength=SIZES)
    devices = sum(
        have.total
        for have in capacity.devices.values()
        if have.schedulable and Island(have.pool, have.kind, have.backend, have.environment) in islands
    )
    drains = np.cumsum(by_size) / max(devices, 1)
    return (float(drains[-1]),) * SIZES if together else tuple(drains.tolist())


def _prices(by_island: Mapping[Island, float], islands: tuple[Island, ...]) -> Floats:
    """Return prices by island, the mean of the others for new islands; empty if there are none."""
    if not by_island or not islands:
        return np.zeros(0)
    mean = sum(by_island.values()) / len(by_island)
    return np.array([by_island.get(island, mean) for island in islands])


def _updated_memory(
    previous: PlanMemory, islands: tuple[Island, ...], updated: decision.PriceMemory, tier: int, fault: str
) -> PlanMemory:
    work = dict(zip(islands, updated.work.tolist(), strict=False))
    devices = dict(previous.devices)
    if islands and 0 in updated.devices:
        devices[tier] = dict(zip(islands, updated.devices[0].tolist(), strict=False))
    return replace(previous, work={**previous.work, **work}, devices=devices, fault=fault or previous.fault)


def _to_tier_decision(arrays: Board, result: decision.WorkDecision, memory: PlanMemory) -> TierDecision:
    queue = len(arrays.jobs) - len(arrays.running)
    option = result.option
    chosen = np.flatnonzero(option[:queue] != WAITS)
    sizes = arrays.work.devices[option[chosen], chosen]
    first = chosen[np.argsort(-sizes, kind="stable")]  # large gangs find nodes while these are empty
    places = {arrays.jobs[job].id: arrays.place(job, int(option[job])) for job in chosen.tolist()}
    strictly = frozenset(arrays.jobs[job].id for job in chosen.tolist() if _follows_decision(arrays, job))
    return TierDecision(
        tuple(arrays.jobs[job] for job in first.tolist()),
        tuple(arrays.jobs[job] for job in np.flatnonzero(option[:queue] == WAITS).tolist()),
        places,
        strictly,
        dict(_leaves(arrays, option, queue)),
        memory,
        result.value,
        result.bound,
        {
            arrays.jobs[job].id: tuple(arrays.nodes[node] for node in nodes)
            for job, nodes in result.nodes.items()
            if job < queue
        },
    )


def _follows_decision(arrays: Board, column: int) -> bool:
    """Return True if the job follows the decision: its options differ, and its user has not chosen otherwise."""
    job = arrays.jobs[column]
    return arrays.follows_decision[column] and not job.ordered and job.objective not in OWN_CHOICE


def _leaves(arrays: Board, option: Integers, queue: int) -> Iterable[tuple[str, LeavingJob]]:
    work = arrays.work
    for column in np.flatnonzero(option != work.held).tolist():
        if column < queue:
            continue
        attempt, to = arrays.running[column - queue], int(option[column])
        remaining_here = arrays.expected(column, arrays.place(column, int(work.held[column])))
        place = arrays.place(column, to) if to != WAITS and _follows_decision(arrays, column) else None
        yield (
            attempt.job,
            LeavingJob(attempt, place, remaining_here, arrays.expected(column, place) if place else remaining_here),
        )
