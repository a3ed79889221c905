"""The best choice of jobs for a number of devices, each job with what it takes and what it is worth."""

import numpy as np

from orchestrator.core.planner.planner_jobs import Floats, Integers

EXACT = 64
"""Devices up to which the choice is the best one. Of more, the jobs worth most per device are taken as they come until
so many are left: all that such a choice can lose lies in the last few jobs.
"""


def choose(capacity: int, sizes: Integers, gains: Floats) -> Integers:
    """Indices of jobs that fit together and are worth most. Gains are positive; of equal jobs the first are taken.

    Jobs of one size are only ever taken in the order of their gain, so that the best for each size is a prefix, and
    the number of each size is what remains to be found.
    """
    taken, left = _surely(capacity, sizes, gains)
    open_ = np.setdiff1d(np.arange(len(sizes)), taken, assume_unique=True) if len(taken) else np.arange(len(sizes))
    return np.concatenate((taken, open_[_exactly(left, sizes[open_], gains[open_])]))


def _surely(capacity: int, sizes: Integers, gains: Floats) -> tuple[Integers, int]:
    if capacity <= EXACT:
        return np.zeros(0, np.int64), capacity
    order = np.argsort(-gains / sizes, kind="stable")
    filled = np.cumsum(sizes[order])
    taken = order[: int(np.searchsorted(filled, capacity - EXACT, side="right"))]
    return taken, capacity - int(sizes[taken].sum())


def _exactly(capacity: int, sizes: Integers, gains: Floats) -> Integers:
    """Dynamic programming over the devices left, one distinct size after the other."""
    devices = np.arange(capacity + 1)
    worth = np.zeros(capacity + 1)
    steps: list[tuple[int, Integers, Integers]] = []
    for size in np.unique(sizes[sizes <= capacity]).tolist():
        jobs = _first(np.flatnonzero(sizes == size), gains, capacity // size)
        prefix = np.concatenate(([0.0], np.cumsum(gains[jobs])))
        before = devices[:, None] - np.arange(len(prefix)) * size
        total = np.where(before >= 0, worth[np.maximum(before, 0)] + prefix, -1.0)
        count = total.argmax(axis=1)
        worth = total[devices, count]
        steps.append((size, jobs, count))
    return _traced(capacity, steps)


def _first(jobs: Integers, gains: Floats, most: int) -> Integers:
    """The `most` of highest gain, in that order."""
    if len(jobs) > most:
        least = np.partition(gains[jobs], len(jobs) - most)[len(jobs) - most]
        jobs = jobs[gains[jobs] >= least]
    return jobs[np.argsort(-gains[jobs], kind="stable")][:most]


def _traced(capacity: int, steps: list[tuple[int, Integers, Integers]]) -> Integers:
    chosen = [np.zeros(0, np.int64)]
    for size, jobs, count in reversed(steps):
        here = int(count[capacity])
        chosen.append(jobs[:here])
        capacity -= here * size
    return np.concatenate(chosen)
