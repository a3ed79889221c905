"""Policies `fifo` and `priority`: running jobs of a tier continue, others start in the order of submission.

A job that does not fit reserves the free devices of the island where it would fit soonest, so no later job delays it.
"""

import numpy as np

from orchestrator.core.plan.arrays.planner_jobs import WAITS, Integers, Work, used


def in_order(work: Work, capacity: Integers) -> Integers:
    """Return (jobs,) the option of each job. Running jobs are not moved, but stopped if capacity has shrunk."""
    option = _keep_running(work, capacity)
    free = capacity - used(work, option, len(capacity))
    waits = np.flatnonzero(option == WAITS)
    for job in waits[np.argsort(work.order[waits], kind="stable")].tolist():
        if not free.any():
            break
        options = np.flatnonzero(work.possible[:, job] & (work.devices[:, job] <= capacity[work.island]))
        options = options[np.argsort(work.remaining_s[options, job], kind="stable")]
        missing = work.devices[options, job] - free[work.island[options]]
        if len(options) and missing.min() <= 0:
            option[job] = options[int((missing <= 0).argmax())]
            free[work.island[option[job]]] -= work.devices[option[job], job]
        elif len(options):
            free[work.island[options[int(missing.argmin())]]] = 0
    return option


def _keep_running(work: Work, capacity: Integers) -> Integers:
    """Return the options of running jobs; the newest stop first if higher tiers took their devices."""
    option = work.held.copy()
    excess = used(work, option, len(capacity)) - capacity
    for job in np.argsort(-work.order, kind="stable").tolist() if (excess > 0).any() else ():
        current = option[job]
        if current != WAITS and excess[work.island[current]] > 0:
            excess[work.island[current]] -= work.devices[current, job]
            option[job] = WAITS
    return option
