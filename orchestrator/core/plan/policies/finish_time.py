"""Policy `finish_time`: the shortest mean time from submission to end, with a weight for the longest times."""

import numpy as np

from orchestrator.core.plan.arrays.planner_jobs import Floats
from orchestrator.core.plan.policies.policy_input import PolicyInput

LENGTH = 0.5
"""Weight of a job's length: at 0 the shortest job comes first, at 1 all are equal on the same devices."""

TAIL = 0.2
"""Weight of the time from submission to end: the policy minimises the sum of that time to the power 1 + TAIL.

At 0 that is the mean; larger values shorten the longest times and lengthen the mean.
"""

FITNESS = 0.1
"""Weight of wasting devices that other work needs more, in addition to the job being slower there."""


def finish_time(inputs: PolicyInput) -> Floats:
    """Minimise the mean time from submission to end: jobs that end soon first, each where it wastes least."""
    return np.asarray(soon_value(inputs) * inputs.fitness**FITNESS)


def soon_value(inputs: PolicyInput) -> Floats:
    """Return a higher value where a job ends soon, and for jobs that will have waited long."""
    stays_s = np.maximum(inputs.work.age_s, 0.0) + inputs.work.best_s
    return np.asarray(inputs.least**LENGTH * stays_s**TAIL / inputs.work.remaining_s)
