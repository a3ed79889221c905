"""How much more a job counts because its deadline comes near. Pure."""

from orchestrator.core.model import Job

MOST = 16.0
"""What a job counts that has to start now to be done in time, where one without a deadline counts 1."""

NEAR_S = 600.0
"""With as much slack as the job takes, or this if that is less, it counts half as much more."""


def slack_s(job: Job, wall_s: float, remaining_s: float) -> float:
    """How long it could wait yet, and be done in time; below 0 it cannot any more."""
    return job.deadline_s - wall_s - remaining_s


def urgency(job: Job, wall_s: float, remaining_s: float) -> float:
    """1 to MOST. `remaining_s` is how long it takes at its best place. A job that cannot be in time any more takes no
    turn from others that can.
    """
    if not job.deadline_s or (slack := slack_s(job, wall_s, remaining_s)) < 0:
        return 1.0
    return 1.0 + (MOST - 1.0) / (1.0 + slack / max(remaining_s, NEAR_S))
