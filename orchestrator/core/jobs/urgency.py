"""Weight of a job that grows as its deadline approaches. Pure."""

from orchestrator.core.model import Job

MAX_WEIGHT = 16.0
"""Weight of a job that must start now to meet its deadline; a job without a deadline has weight 1."""

NEAR_S = 600.0
"""The extra weight is halved if the slack equals the remaining time, or these seconds if the job is shorter."""


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
