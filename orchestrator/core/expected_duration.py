"""How long a job would run from now on, by kind and number of devices, as a plan sees it."""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.core.model import Job, Progress, Snapshot
from orchestrator.core.policy import HIGHEST
from orchestrator.core.remaining_time import Known, attained, is_known, remaining

RESTART_S = 60.0
"""Of a job whose own start was not seen yet."""

NONE = Progress()


@dataclass(frozen=True, slots=True)
class Expected:
    """`known`: it was measured, reported or declared for this kind, or for one that is measured beside it."""

    seconds: float
    known: bool


Expect = Callable[[Job, str, int], Expected]
"""Of a job, on a kind, with so many devices in all."""


def expected(seen: Snapshot) -> Expect:
    running = {attempt.job: attempt for attempt in seen.running}

    def of(job: Job, kind: str, devices: int) -> Expected:
        progress, live = seen.progress.get(job.id, NONE), running.get(job.id)
        done = attained(progress, live, in_state_s(job.id, seen)) if live else progress.ran_on
        known = Known(seen.throughput, progress, seen.history, done)
        return Expected(remaining(job, kind, devices, known).seconds, is_known(job, kind, known))

    return of


def in_state_s(job: str, seen: Snapshot) -> float:
    """Since it waits, or since its attempt is placed."""
    since = seen.since.get(job)
    return max(0.0, seen.now_s - since.state_s) if since else 0.0


def tier(job: Job, seen: Snapshot) -> int:
    """Its priority, and one more for each `ageing_s` that it has waited."""
    if not seen.ageing_s:
        return job.priority
    return min(HIGHEST, job.priority + int(in_state_s(job.id, seen) // seen.ageing_s))


def restart_s(job: str, seen: Snapshot) -> float:
    """What a start or a move costs it: from its placing to its first step."""
    told = seen.progress.get(job)
    return told.starts_s if told and told.starts_s else RESTART_S
