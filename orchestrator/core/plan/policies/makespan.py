"""Policy `makespan`: the earliest end of the last job."""

import numpy as np

from orchestrator.core.plan.arrays.planner_jobs import Floats
from orchestrator.core.plan.policies.policy_input import PolicyInput

ON_TIME = 16.0
"""Weight of waste (see FITNESS of finish_time.py) if only the end of the last job counts."""

SLACK = 0.1
"""Fraction of the horizon: a job that can wait this long has half the value of one that cannot wait."""


def makespan(inputs: PolicyInput) -> Floats:
    """Minimise the end of the last job: jobs that can wait least first, each where it wastes least."""
    horizon_s = inputs.matching.horizon_s
    slack = np.maximum(1.0 - np.where(np.isfinite(inputs.cost), inputs.work.remaining_s, 0.0) / horizon_s, 0.0)
    worth = inputs.work.devices * inputs.matching.price[inputs.work.island][:, None]
    return np.asarray(worth * inputs.fitness ** (1.0 + ON_TIME) / (slack + SLACK))
