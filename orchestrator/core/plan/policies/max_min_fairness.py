"""Policy `max_min_fairness`: devices first for the jobs that have received the least."""

import numpy as np

from orchestrator.core.plan.arrays.planner_jobs import Floats
from orchestrator.core.plan.policies.policy_input import PolicyInput

SHARE = 0.05
"""Fraction of its isolated progress below which a job does not become more urgent."""


def max_min_fairness(inputs: PolicyInput) -> Floats:
    """Prefer jobs that have received the smallest part of what they would have had alone since submission."""
    work = inputs.work
    got = np.maximum(work.isolated_s - work.best_s, 0.0) / np.maximum(work.age_s, 1.0)
    return np.asarray(work.devices * (work.best_s / work.remaining_s) / (np.minimum(got, 1.0) + SHARE))
