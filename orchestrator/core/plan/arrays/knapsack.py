"""Choose the most valuable jobs for a number of devices (knapsack)."""

import numpy as np

from orchestrator.core.plan.arrays.planner_jobs import Floats, Integers

MAX_EXACT = 64
"""Number of devices up to which the choice is optimal.

Of more devices, the jobs with most value per device get all but this many, so that only the last few jobs of the choice
can be suboptimal.
"""


def choose(capacity: int, sizes: Integers, gains: Floats) -> Integers:
    """Return the indices of the most valuable jobs that fit together. Gains are positive; of equal jobs the first win.

    Jobs of one size are chosen in the order of their gain. So the best choice of each size is a prefix of that order,
    and only the number of jobs per size is unknown.
    """
    certain, left = _greedy_part(capacity, sizes, gains)
    undecided = (
        np.setdiff1d(np.arange(len(sizes)), certain, assume_unique=True) if len(certain) else np.arange(len(sizes))
    )
    return np.concatenate((certain, undecided[_exact_part(left, sizes[undecided], gains[undecided])]))


def _greedy_part(capacity: int, sizes: Integers, gains: Floats) -> tuple[Integers, int]:
    if capacity <= MAX_EXACT:
        return np.zeros(0, np.int64), capacity
    order = np.argsort(-gains / sizes, kind="stable")
    filled = np.cumsum(sizes[order])
    certain = order[: int(np.searchsorted(filled, capacity - MAX_EXACT, side="right"))]
    return certain, capacity - int(sizes[certain].sum())


def _exact_part(capacity: int, sizes: Integers, gains: Floats) -> Integers:
    """Solve exactly by dynamic programming over the devices left, one distinct size after the other."""
    devices = np.arange(capacity + 1)
    worth = np.zeros(capacity + 1)
    steps: list[tuple[int, Integers, Integers]] = []
    for size in np.unique(sizes[sizes <= capacity]).tolist():
        jobs = _best(np.flatnonzero(sizes == size), gains, capacity // size)
        prefix = np.concatenate(([0.0], np.cumsum(gains[jobs])))
        before = devices[:, None] - np.arange(len(prefix)) * size
        total = np.where(before >= 0, worth[np.maximum(before, 0)] + prefix, -1.0)
        count = total.argmax(axis=1)
        worth = total[devices, count]
        steps.append((size, jobs, count))
    return _trace_back(capacity, steps)


def _best(jobs: Integers, gains: Floats, most: int) -> Integers:
    """Return the `most` jobs of highest gain, in that order."""
    if len(jobs) > most:
        least = np.partition(gains[jobs], len(jobs) - most)[len(jobs) - most]
        jobs = jobs[gains[jobs] >= least]
    return jobs[np.argsort(-gains[jobs], kind="stable")][:most]


def _trace_back(capacity: int, steps: list[tuple[int, Integers, Integers]]) -> Integers:
    chosen = [np.zeros(0, np.int64)]
    for size, jobs, count in reversed(steps):
        chosen_count = int(count[capacity])
        chosen.append(jobs[:chosen_count])
        capacity -= chosen_count * size
    return np.concatenate(chosen)
