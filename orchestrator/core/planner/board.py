"""What is decided for the jobs of one tier, as columns: which jobs, on which islands, with how many devices, how long.

Jobs of which nothing has run and that ask for the same are one class: what is found for one holds for all of them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.core.capacity import Room
from orchestrator.core.expected_duration import Expect, Expected, restart_s
from orchestrator.core.fit import least, other_vendor
from orchestrator.core.model import Candidate, Job, Running, Snapshot
from orchestrator.core.placement_slots import Island, Place
from orchestrator.core.planner.memory_limits import Needs, Obtainable, island_of, machines
from orchestrator.core.planner.planner_jobs import WAITS, Floats, Integers, Work
from orchestrator.core.urgency import urgency

FEW = 8
"""Up to so many devices of a node all numbers of a range are thought about; of more, powers of two and the greatest."""

UNKNOWN_CPU = 20.0
"""A CPU nobody measured counts as so much slower than an accelerator of the same job: for the order of jobs only."""


@dataclass(frozen=True, slots=True)
class Way:
    """A place, how long the job would run there, and the memory that it asks for each device."""

    place: Place
    expected: Expected
    device_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Board:
    """`work` has a column for each of `jobs`: first those that wait, then those of the attempts `running`. `places`
    says by column what each option is; options that a job has not are None. `known` (jobs,): its options differ, and
    how long it runs is known on each, or they are numbers of the same devices. `ways` by column are those that it has.
    `nodes` are the devices ids of the nodes that `work.machines` has.
    """

    jobs: tuple[Job, ...]
    running: tuple[Running, ...]
    islands: tuple[Island, ...]
    places: tuple[tuple[Place | None, ...], ...]
    ways: tuple[tuple[Way, ...], ...]
    known: tuple[bool, ...]
    capacity: Integers
    work: Work
    nodes: tuple[str, ...] = ()

    def place(self, column: int, option: int) -> Place:
        found = self.places[column][option]
        assert found is not None
        return found

    def expected(self, column: int, place: Place) -> Expected:
        return next(way.expected for way in self.ways[column] if way.place == place)


def board(
    seen: Snapshot, waiting: Iterable[Job], running: Iterable[Running], room: Room, lower: int, expect: Expect
) -> Board:
    """`running` are attempts that may be stopped or moved; their devices count as free, as do those of attempts below
    priority `lower`, which stop for these jobs.
    """
    queue = tuple(waiting)
    moving = [(r, held) for r in running if (held := _held(r, room)) is not None]
    jobs = (*queue, *(r.asked for r, _ in moving if r.asked is not None))
    obtainable = Obtainable.of([r for r, _ in moving], room, lower)
    classes: dict[tuple[object, ...], int] = {}
    ways: list[tuple[Way, ...]] = []
    of_job: list[int] = []
    for job in queue:
        key = (room.shape(job), _work_of(job), job.id if job.id in seen.progress else "")
        if key not in classes:
            classes[key] = len(ways)
            ways.append(tuple(_ways(job, room, obtainable, expect)))
        of_job.append(classes[key])
    for attempt, held in moving:
        assert attempt.asked is not None
        of_job.append(len(ways))
        found = _ways(attempt.asked, room, obtainable, expect, attempt)
        ways.append(tuple(_with(found, held, attempt.asked, expect)))
    return _columns(seen, jobs, moving, ways, of_job, obtainable)


def _work_of(job: Job) -> tuple[object, ...]:
    """What decides, beside its shape, on the numbers of devices that it may get and on how long it runs there."""
    work = job.work
    batches = [(want.precision, want.batch_size if want.whole_batch else 0) for want in job.candidates]
    return (job.workload, job.content_sha, job.task, work.steps, work.hours, work.on, *batches)


def _held(attempt: Running, room: Room) -> Place | None:
    """Where it runs, None where not all of that takes jobs now."""
    have = [room.devices.get(devices_id) for devices_id, _ in attempt.leases]
    if not all(d is not None and d.schedulable for d in have) or have[0] is None:
        return None
    return Place(attempt.candidate, island_of(have[0]), len(attempt.leases[0][1]), len(attempt.leases))


def _ways(job: Job, room: Room, obtainable: Obtainable, expect: Expect, gives: Running | None = None) -> list[Way]:
    """`gives` is its attempt that would end first."""
    found = [
        Way(place, expect(job, place.island.kind, place.devices), want.memory_bytes)
        for index, want in enumerate(job.candidates)
        for place in _places(index, want, job, room, obtainable, gives)
    ]
    if any(way.place.island.backend != "cpu" for way in found):
        return [_slower(way) if way.place.island.backend == "cpu" and not way.expected.known else way for way in found]
    return found


def _slower(way: Way) -> Way:
    return replace(way, expected=Expected(way.expected.seconds * UNKNOWN_CPU, known=False))


def _places(
    index: int, want: Candidate, job: Job, room: Room, obtainable: Obtainable, gives: Running | None
) -> Iterable[Place]:
    for island, ids in room.places(want).islands.items():
        first = room.devices[ids[0]]
        if other_vendor(job, first):  # an island has one vendor
            continue
        own = room.quota.narrowed(job, want, first, gives)
        if own is None:
            continue
        free = sorted(obtainable.on(ids, want), reverse=True)
        for count in [least(own, first)] if own.exclusive else counts(own):
            if len(free) >= want.nodes and free[want.nodes - 1] >= count:
                yield Place(index, replace(island, per_node=0), count, want.nodes)


def counts(want: Candidate) -> list[int]:
    """Of the numbers of devices of a node that it may get, those that are thought about."""
    greatest = want.counts[-1]
    return [n for n in want.counts if n <= FEW or n == greatest or n & (n - 1) == 0]


def _with(ways: list[Way], held: Place, job: Job, expect: Expect) -> list[Way]:
    """Also what it holds, as which it may stay whatever rules say of others."""
    if any(way.place == held for way in ways):
        return ways
    size_bytes = job.candidates[held.candidate].memory_bytes
    return [*ways, Way(held, expect(job, held.island.kind, held.devices), size_bytes)]


def _columns(
    seen: Snapshot,
    jobs: tuple[Job, ...],
    moving: list[tuple[Running, Place]],
    ways: list[tuple[Way, ...]],
    of_job: list[int],
    obtainable: Obtainable,
) -> Board:
    """`ways` by class, `of_job` the class of each job."""
    capacity = _capacity(ways, obtainable)
    rows = _rows(ways, list(capacity))
    placed = [_placed(each, rows) for each in ways]
    devices, seconds = np.ones((len(rows), len(ways)), np.int64), np.full((len(rows), len(ways)), np.inf)
    for at, (each, (indices, _, _)) in enumerate(zip(ways, placed, strict=True)):
        devices[indices, at] = [way.place.devices for way in each]
        seconds[indices, at] = [way.expected.seconds for way in each]
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
        age_s=np.array([_age_s(job.id, seen) for job in jobs]),
        isolated_s=_isolated_s(seen, jobs, best_s),
        restart_s=np.array([restart_s(job.id, seen) for job in jobs]),
        order=np.array([job.number or 1 << 62 for job in jobs], np.int64),
        weight=_weight(seen, jobs, best_s),
    )
    running = tuple(attempt for attempt, _ in moving)
    nodes: tuple[str, ...] = ()
    if obtainable.memory_bytes:
        needs = _needs(ways, [indices for indices, _, _ in placed], len(rows), of_job)
        limits, nodes = machines(obtainable, tuple(capacity), work, needs, jobs, running)
        work = replace(work, machines=limits)
    return Board(
        jobs,
        running,
        tuple(capacity),
        tuple(placed[at][1] for at in of_job),
        tuple(ways[at] for at in of_job),
        tuple(placed[at][2] for at in of_job),
        np.array(list(capacity.values()), np.int64),
        work,
        nodes,
    )


def _needs(ways: list[tuple[Way, ...]], indices: list[list[int]], options: int, of_job: list[int]) -> Needs:
    """`indices` by class: the option of each of its ways."""
    nodes, device_bytes = np.ones((options, len(ways)), np.int64), np.zeros((options, len(ways)), np.int64)
    for at, each in enumerate(ways):
        nodes[indices[at], at] = [way.place.nodes for way in each]
        device_bytes[indices[at], at] = [way.device_bytes for way in each]
    return Needs(nodes[:, of_job], device_bytes[:, of_job])


def _rows(ways: list[tuple[Way, ...]], islands: list[Island]) -> list[tuple[Island, int]]:
    """The options: as many of each island as any job has there."""
    most = dict.fromkeys(islands, 0)
    for each in ways:
        here = Counter(way.place.island for way in each)
        most |= {island: max(most[island], number) for island, number in here.items()}
    return [(island, nth) for island in islands for nth in range(most[island])]


def _placed(ways: tuple[Way, ...], rows: list[tuple[Island, int]]) -> tuple[list[int], tuple[Place | None, ...], bool]:
    """(row of each way, place by row, whether all is known and differs)"""
    index = {row: at for at, row in enumerate(rows)}
    seen: dict[Island, int] = {}
    found: list[int] = []
    for way in ways:
        nth = seen.get(way.place.island, 0)
        seen[way.place.island] = nth + 1
        found.append(index[way.place.island, nth])
    by_row: list[Place | None] = [None] * len(rows)
    for at, way in zip(found, ways, strict=True):
        by_row[at] = way.place
    alike = len(ways) > 1 and len({way.expected.seconds for way in ways}) == 1
    told = all(way.expected.known for way in ways) or len({way.place.island for way in ways}) == 1
    return found, tuple(by_row), told and not alike


def _age_s(job: str, seen: Snapshot) -> float:
    since = seen.since.get(job)
    return seen.now_s - since.known_s if since else 0.0


def _isolated_s(seen: Snapshot, jobs: tuple[Job, ...], best_s: Floats) -> Floats:
    ran_s = np.array([p.ran_s if (p := seen.progress.get(job.id)) else 0.0 for job in jobs])
    return np.asarray(np.where(np.isfinite(best_s), best_s, 0.0) + ran_s)


def _weight(seen: Snapshot, jobs: tuple[Job, ...], best_s: Floats) -> Floats:
    weight = np.array([job.weight for job in jobs], np.float64)
    for column, job in enumerate(jobs):
        if job.deadline_s:
            weight[column] *= urgency(job, seen.wall_s, float(best_s[column]))
    return weight


def _capacity(ways: list[tuple[Way, ...]], obtainable: Obtainable) -> dict[Island, int]:
    """Devices by island, in a fixed order."""
    capacity = dict.fromkeys(sorted({way.place.island for each in ways for way in each}), 0)
    for devices_id, count in obtainable.devices.items():
        if (island := island_of(obtainable.room.devices[devices_id])) in capacity:
            capacity[island] += count
    return capacity
