"""Policy `cost`: the least money."""

import numpy as np

from orchestrator.core.plan.arrays.planner_jobs import Floats
from orchestrator.core.plan.policies.finish_time import soon_value
from orchestrator.core.plan.policies.policy_input import PolicyInput


def cost(inputs: PolicyInput) -> Floats:
    """Like `finish_time`, but prefer options that cost least money: `inputs` has the real prices."""
    return np.asarray(soon_value(inputs) * inputs.fitness**4)
