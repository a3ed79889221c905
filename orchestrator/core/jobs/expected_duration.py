"""Estimate how long a job would still run, by kind and number of devices, and how urgent its deadline makes it."""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.core.jobs.remaining_time import Evidence, attained, has_evidence, remaining
from orchestrator.core.model import HIGHEST, Job, Progress, Snapshot

RESTART_S = 60.0
"""Assumed duration of a start, for a job whose own start was not measured yet."""

MAX_WEIGHT = 16.0
"""Weight of a job that must start now to meet its deadline; a job without a deadline has weight 1."""

NEAR_S = 600.0
"""The extra weight is halved if the slack equals the remaining time, or these seconds if the job is shorter."""

NO_PROGRESS = Progress()


@dataclass(frozen=True, slots=True)
class ExpectedDuration:
    """Expected remaining time.

    `has_evidence`: it was measured, reported or declared for this kind or for one with a measured relative speed; else
    it is a guess.
    """

    seconds: float
    has_evidence: bool


Expect = Callable[[Job, str, int], ExpectedDuration]
"""Function of a job, a kind and a total number of devices."""


def expectation(snapshot: Snapshot) -> Expect:
    running = {attempt.job: attempt for attempt in snapshot.running}

    def of(job: Job, kind: str, devices: int) -> ExpectedDuration:
        progress, running_attempt = snapshot.progress.get(job.id, NO_PROGRESS), running.get(job.id)
        done = attained(progress, running_attempt, in_state_s(job.id, snapshot)) if running_attempt else progress.ran_on
        evidence = Evidence(snapshot.throughput, progress, snapshot.history, done)
        return ExpectedDuration(remaining(job, kind, devices, evidence).seconds, has_evidence(job, kind, evidence))

    return of


def in_state_s(job: str, snapshot: Snapshot) -> float:
    """Return the seconds since the job began to wait or its attempt was placed."""
    since = snapshot.since.get(job)
    return max(0.0, snapshot.now_s - since.state_s) if since else 0.0


def tier(job: Job, snapshot: Snapshot) -> int:
    """Return the job's priority, plus one for each `ageing_s` seconds of waiting, at most HIGHEST."""
    if not snapshot.ageing_s:
        return job.priority
    return min(HIGHEST, job.priority + int(in_state_s(job.id, snapshot) // snapshot.ageing_s))


def restart_s(job: str, snapshot: Snapshot) -> float:
    """Return the cost of a stop and a new start: seconds to save, progress lost since the checkpoint, and seconds from
    the placement to the first step, which include copying the checkpoint. RESTART_S until a start was measured.
    """
    progress = snapshot.progress.get(job)
    return progress.starts_s + progress.stops_s if progress and progress.starts_s else RESTART_S


def slack_s(job: Job, wall_s: float, remaining_s: float) -> float:
    """Return how long the job can still wait and meet its deadline; below 0: it will miss it."""
    return job.deadline_s - wall_s - remaining_s


def urgency(job: Job, wall_s: float, remaining_s: float) -> float:
    """Return a weight from 1 to MAX_WEIGHT. `remaining_s` is the job's remaining time at its best place.

    A job that will miss its deadline has weight 1, so that it does not delay jobs that can meet theirs.
    """
    if not job.deadline_s or (slack := slack_s(job, wall_s, remaining_s)) < 0:
        return 1.0
    return 1.0 + (MAX_WEIGHT - 1.0) / (1.0 + slack / max(remaining_s, NEAR_S))
