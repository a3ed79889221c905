"""How jobs really ran, from their records in a server's log: times, devices and durations."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.states import TERMINAL
from orchestrator.simulation.fleets import MAX_DEVICES, Fleet
from orchestrator.simulation.traces import MAX_TIME_S

NEVER_RAN, UNREADABLE = "never_ran", "unreadable"


@dataclass(frozen=True, slots=True)
class JobRun:
    """A job that ran.

    `attempts`: those of `all_attempts` that started; `longest`: the one with most device time.

    `end_s`: wall time of its end, or of the log's end if the job has not ended.
    """

    record: Record
    all_attempts: tuple[Attempt, ...]
    attempts: tuple[Attempt, ...]
    longest: Attempt
    end_s: float

    @property
    def arrival_s(self) -> float:
        return self.record.job.submitted_s

    @property
    def is_unfinished(self) -> bool:
        return self.record.job.state not in TERMINAL

    def lasted_s(self, attempt: Attempt) -> float:
        """Seconds from the attempt's start to its end, at least 0: clocks may have been set in between."""
        return _lasted_s(attempt, self.end_s)


def job_run(record: Record, newest_s: float) -> JobRun | str:
    """Convert a record. NEVER_RAN: no attempt has started. UNREADABLE: times or devices are not plausible."""
    held = record.attempts
    attempts = tuple(a for a in held if a.started_s is not None)
    if not attempts:
        return NEVER_RAN
    end_s = record.ended_s if record.ended_s is not None else newest_s
    times = [record.job.submitted_s, end_s]
    times += [t for a in held for t in (a.placed_s, a.started_s, a.ended_s) if t is not None]
    if not all(math.isfinite(t) and abs(t) <= MAX_TIME_S for t in times) or end_s < record.job.submitted_s:
        return UNREADABLE
    if not all(0 < devices(a) <= MAX_DEVICES and a.kind.isprintable() for a in held):
        return UNREADABLE
    longest = max(attempts, key=lambda a: _lasted_s(a, end_s) * devices(a))
    return JobRun(record, held, attempts, longest, end_s)


def devices(attempt: Attempt) -> int:
    return sum(len(numbers) for _, numbers in attempt.allocation)


def pools_of(jobs: Iterable[JobRun]) -> dict[str, set[str]]:
    """Pools that had devices of each kind."""
    pools: dict[str, set[str]] = defaultdict(set)
    for attempt in (a for job in jobs for a in job.all_attempts):
        pools[attempt.kind].add(attempt.pool)
    return pools


def largest_fleet(jobs: Sequence[JobRun]) -> Fleet:
    """Make a fleet with the maximum number of devices of each kind that these jobs held at a time."""
    changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for job in jobs:
        for a in job.all_attempts:
            changes[a.kind] += [(a.placed_s, devices(a)), (max(_ended_s(a, job.end_s), a.placed_s), -devices(a))]
    maximum = {kind: _max_held(kind_changes) for kind, kind_changes in sorted(changes.items())}
    largest_gang = {
        kind: max((devices(a) for job in jobs for a in job.all_attempts if a.kind == kind), default=1)
        for kind in maximum
    }
    return Fleet(tuple(maximum), np.array([max(maximum[kind], largest_gang[kind]) for kind in maximum], np.int64))


def _max_held(changes: list[tuple[float, int]]) -> int:
    """Maximum of the devices held. Devices that are released at a moment can be used again at that moment."""
    held = np.cumsum([change for _, change in sorted(changes)])
    return min(int(held.max()), MAX_DEVICES)


def _lasted_s(attempt: Attempt, otherwise_s: float) -> float:
    started_s = attempt.started_s if attempt.started_s is not None else math.inf
    return max(_ended_s(attempt, otherwise_s) - started_s, 0.0)


def _ended_s(attempt: Attempt, otherwise_s: float) -> float:
    return attempt.ended_s if attempt.ended_s is not None else otherwise_s
