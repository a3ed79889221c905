"""Build the arrays of one tier: a column per job, a row per option (island and number of devices), with durations.

Jobs that have not run yet and have equal requests form one class, which is computed once.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.core.jobs.expected_duration import Expect, ExpectedDuration, restart_s, urgency
from orchestrator.core.model import Candidate, Job, Running, Snapshot
from orchestrator.core.placement_slots import Island, Place
from orchestrator.core.plan.arrays.planner_jobs import WAITS, Floats, Integers, Work
from orchestrator.core.plan.assignment.memory_limits import Needs, Obtainable, island_of, limited_machines
from orchestrator.core.plan.options.capacity import FreeCapacity
from orchestrator.core.plan.options.fit import minimum_count, takes_all_devices, vendor_change_reason

MAX_ALL_COUNTS = 8
"""Numbers of devices per node up to which all are options; above, only powers of two and the largest."""

UNMEASURED_CPU_FACTOR = 20.0
"""Assumed slowdown of an unmeasured CPU against an accelerator of the same job; affects only the order of jobs."""


@dataclass(frozen=True, slots=True)
class PlaceChoice:
    """Place, expected duration of the job there, and requested memory per device."""

    place: Place
    expected: ExpectedDuration
    device_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Board:
    """Arrays of one tier, and what their rows and columns mean.

    `work` has a column for each of `jobs`: first the waiting ones, then those of the attempts `running`. `places`, by
    column: the place of each option, None if the job does not have that option. `follows_decision` (jobs,): its options
    differ in duration, and the durations are known or the options are numbers of the same devices. `choices`, by
    column: the options that the job has. `nodes` are the devices ids of the nodes in `work.machines`.
    """

    jobs: tuple[Job, ...]
    running: tuple[Running, ...]
    islands: tuple[Island, ...]
    places: tuple[tuple[Place | None, ...], ...]
    choices: tuple[tuple[PlaceChoice, ...], ...]
    follows_decision: tuple[bool, ...]
    capacity: Integers
    work: Work
    nodes: tuple[str, ...] = ()

    def place(self, column: int, option: int) -> Place:
        place = self.places[column][option]
        assert place is not None
        return place

    def expected(self, column: int, place: Place) -> ExpectedDuration:
        return next(choice.expected for choice in self.choices[column] if choice.place == place)


def board(
    snapshot: Snapshot,
    waiting: Iterable[Job],
    running: Iterable[Running],
    capacity: FreeCapacity,
    lower: int,
    expect: Expect,
) -> Board:
    """Build the board. Devices of `running` and of attempts below priority `lower` count as free.

    `running` are attempts that may be stopped or moved; attempts below `lower` stop for these jobs.
    """
    queue = tuple(waiting)
    moving = [(r, place) for r in running if (place := _held_place(r, capacity)) is not None]
    jobs = (*queue, *(r.spec for r, _ in moving if r.spec is not None))
    obtainable = Obtainable.of([r for r, _ in moving], capacity, lower)
    classes: dict[tuple[object, ...], int] = {}
    choices: list[tuple[PlaceChoice, ...]] = []
    of_job: list[int] = []
    for job in queue:
        key = (capacity.shape(job), _work_of(job), job.id if job.id in snapshot.progress else "")
        if key not in classes:
            classes[key] = len(choices)
            choices.append(tuple(_choices(job, capacity, obtainable, expect)))
        of_job.append(classes[key])
    for attempt, place in moving:
        assert attempt.spec is not None
        of_job.append(len(choices))
        own_choices = _choices(attempt.spec, capacity, obtainable, expect, attempt)
        choices.append(tuple(_with_held(own_choices, place, attempt.spec, expect)))
    return _columns(snapshot, jobs, moving, choices, of_job, obtainable)


def _work_of(job: Job) -> tuple[object, ...]:
    """Return the fields that, with the job's shape, determine its numbers of devices and its durations."""
    work = job.work
    batches = [(want.precision, want.batch_size if want.whole_batch else 0) for want in job.candidates]
    return (job.workload, job.content_sha, job.task, work.steps, work.hours, work.on, *batches)


def _held_place(attempt: Running, capacity: FreeCapacity) -> Place | None:
    """Return the place of an attempt, None if one of its nodes takes no jobs now."""
    devices = [capacity.devices.get(devices_id) for devices_id, _ in attempt.allocation]
    if not all(d is not None and d.schedulable for d in devices) or devices[0] is None:
        return None
    return Place(attempt.candidate, island_of(devices[0]), len(attempt.allocation[0][1]), len(attempt.allocation))


def _choices(
    job: Job, capacity: FreeCapacity, obtainable: Obtainable, expect: Expect, ending: Running | None = None
) -> list[PlaceChoice]:
    """Return the options of a job. `ending` is its attempt, which would end first."""
    choices = [
        PlaceChoice(place, expect(job, place.island.kind, place.devices), want.memory_bytes)
        for index, want in enumerate(job.candidates)
        for place in _different(_places(index, want, job, capacity, obtainable, ending), want)
    ]
    if any(choice.place.island.backend != "cpu" for choice in choices):
        return [
            _slow_down(choice) if choice.place.island.backend == "cpu" and not choice.expected.has_evidence else choice
            for choice in choices
        ]
    return choices


def _different(options: Iterable[Place], want: Candidate) -> Iterable[Place]:
    """Return options without repetitions, which only candidates on several nodes have: in slices of one pool."""
    return dict.fromkeys(options) if want.nodes > 1 else options


def _slow_down(choice: PlaceChoice) -> PlaceChoice:
    return replace(
        choice, expected=ExpectedDuration(choice.expected.seconds * UNMEASURED_CPU_FACTOR, has_evidence=False)
    )


def _places(
    index: int, want: Candidate, job: Job, capacity: FreeCapacity, obtainable: Obtainable, ending: Running | None
) -> Iterable[Place]:
    for island, ids in capacity.candidate_nodes(want).islands.items():
        first = capacity.devices[ids[0]]
        if vendor_change_reason(job, first):  # an island has one vendor
            continue
        narrowed = capacity.quota.narrow(job, want, first, ending)
        if narrowed is None:
            continue
        free = sorted(obtainable.counts_on(ids, want), reverse=True)
        if len(free) < want.nodes:
            continue
        is_plain = not (island.per_node or island.tpu_slice)
        merged = island if is_plain else replace(island, per_node=0, tpu_slice="")  # slices of a pool are one here
        takes_all = takes_all_devices(narrowed, first)
        for count in [minimum_count(narrowed, first)] if takes_all else counts(narrowed):
            if free[want.nodes - 1] >= count:
                yield Place(index, merged, count, want.nodes)


def counts(want: Candidate) -> list[int]:
    """Return the numbers of devices per node that become options."""
    greatest = want.counts[-1]
    return [n for n in want.counts if n <= MAX_ALL_COUNTS or n == greatest or n & (n - 1) == 0]


def _with_held(choices: list[PlaceChoice], current: Place, job: Job, expect: Expect) -> list[PlaceChoice]:
    """Add the place that the job holds: it may stay there even if the rules refuse it now."""
    if any(choice.place == current for choice in choices):
        return choices
    size_bytes = job.candidates[current.candidate].memory_bytes
    return [*choices, PlaceChoice(current, expect(job, current.island.kind, current.devices), size_bytes)]


def _columns(
    snapshot: Snapshot,
    jobs: tuple[Job, ...],
    moving: list[tuple[Running, Place]],
    choices: list[tuple[PlaceChoice, ...]],
    of_job: list[int],
    obtainable: Obtainable,
) -> Board:
    """Build the columns. `choices` are by class, `of_job` is the class of each job."""
    capacity = _capacity(choices, obtainable)
    rows = _rows(choices, list(capacity))
    placed = [_placed(each, rows) for each in choices]
    devices, seconds = np.ones((len(rows), len(choices)), np.int64), np.full((len(rows), len(choices)), np.inf)
    for at, (each, (indices, _, _)) in enumerate(zip(choices, placed, strict=True)):
        devices[indices, at] = [choice.place.devices for choice in each]
        seconds[indices, at] = [choice.expected.seconds for choice in each]
    option = np.full(len(jobs), WAITS, np.int64)
    for column, (_, place) in enumerate(moving, len(jobs) - len(moving)):
        option[column] = placed[of_job[column]][1].index(place)
    order = {island: at for at, island in enumerate(capacity)}
    best_s, remaining_s = seconds.min(axis=0, initial=np.inf)[of_job], seconds[:, of_job]
    work = Work.of(
        np.array([order[island] for island, _ in rows], np.int64),
        devices[:, of_job],
        remaining_s,
        option,
        age_s=np.array([_age_s(job.id, snapshot) for job in jobs]),
        isolated_s=_isolated_s(snapshot, jobs, best_s),
        restart_s=np.array([restart_s(job.id, snapshot) for job in jobs]),
        order=np.array([job.number or 1 << 62 for job in jobs], np.int64),
        weight=_weight(snapshot, jobs, best_s),
    )
    running = tuple(attempt for attempt, _ in moving)
    nodes: tuple[str, ...] = ()
    if obtainable.memory_bytes:
        needs = _needs(choices, [indices for indices, _, _ in placed], len(rows), of_job)
        limits, nodes = limited_machines(obtainable, tuple(capacity), work, needs, jobs, running)
        work = replace(work, machines=limits)
    return Board(
        jobs,
        running,
        tuple(capacity),
        tuple(placed[at][1] for at in of_job),
        tuple(choices[at] for at in of_job),
        tuple(placed[at][2] for at in of_job),
        np.array(list(capacity.values()), np.int64),
        work,
        nodes,
    )


def _needs(choices: list[tuple[PlaceChoice, ...]], indices: list[list[int]], options: int, of_job: list[int]) -> Needs:
    """Return nodes and memory per option and job. `indices`, by class: the option number of each of its `choices`."""
    nodes, device_bytes = np.ones((options, len(choices)), np.int64), np.zeros((options, len(choices)), np.int64)
    for at, each in enumerate(choices):
        nodes[indices[at], at] = [choice.place.nodes for choice in each]
        device_bytes[indices[at], at] = [choice.device_bytes for choice in each]
    return Needs(nodes[:, of_job], device_bytes[:, of_job])


def _rows(choices: list[tuple[PlaceChoice, ...]], islands: list[Island]) -> list[tuple[Island, int]]:
    """Return the options (rows): as many per island as any job has there."""
    most = dict.fromkeys(islands, 0)
    for each in choices:
        island_counts = Counter(choice.place.island for choice in each)
        most |= {island: max(most[island], number) for island, number in island_counts.items()}
    return [(island, nth) for island in islands for nth in range(most[island])]


def _placed(
    choices: tuple[PlaceChoice, ...], rows: list[tuple[Island, int]]
) -> tuple[list[int], tuple[Place | None, ...], bool]:
    """Return (row of each option of the job, place by row, `follows_decision` as in Board)."""
    index = {row: at for at, row in enumerate(rows)}
    counts: dict[Island, int] = {}
    row_of_choice: list[int] = []
    for choice in choices:
        nth = counts.get(choice.place.island, 0)
        counts[choice.place.island] = nth + 1
        row_of_choice.append(index[choice.place.island, nth])
    by_row: list[Place | None] = [None] * len(rows)
    for at, choice in zip(row_of_choice, choices, strict=True):
        by_row[at] = choice.place
    are_equal = len(choices) > 1 and len({choice.expected.seconds for choice in choices}) == 1
    is_known = (
        all(choice.expected.has_evidence for choice in choices) or len({choice.place.island for choice in choices}) == 1
    )
    return row_of_choice, tuple(by_row), is_known and not are_equal


def _age_s(job: str, snapshot: Snapshot) -> float:
    since = snapshot.since.get(job)
    return snapshot.now_s - since.added_s if since else 0.0


def _isolated_s(snapshot: Snapshot, jobs: tuple[Job, ...], best_s: Floats) -> Floats:
    ran_s = np.array([p.ran_s if (p := snapshot.progress.get(job.id)) else 0.0 for job in jobs])
    return np.asarray(np.where(np.isfinite(best_s), best_s, 0.0) + ran_s)


def _weight(snapshot: Snapshot, jobs: tuple[Job, ...], best_s: Floats) -> Floats:
    weight = np.array([job.weight for job in jobs], np.float64)
    for column, job in enumerate(jobs):
        if job.deadline_s:
            weight[column] *= urgency(job, snapshot.wall_s, float(best_s[column]))
    return weight


def _capacity(choices: list[tuple[PlaceChoice, ...]], obtainable: Obtainable) -> dict[Island, int]:
    """Return the number of devices by island, in a fixed order."""
    capacity = dict.fromkeys(sorted({choice.place.island for each in choices for choice in each}), 0)
    for devices_id, count in obtainable.devices.items():
        if (island := island_of(obtainable.capacity.devices[devices_id])) in capacity:
            capacity[island] += count
    return capacity
