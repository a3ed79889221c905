"""First come, first served: jobs that run go on, the others start in the order of submission.

A job that does not fit keeps what is free on the island where it would fit soonest: no later one delays it there.
"""

import numpy as np

from orchestrator.core.planner.planner_jobs import WAITS, Integers, Work, used


def in_order(work: Work, capacity: Integers) -> Integers:
    """(jobs,) the option of each. Nothing that runs is moved; it is stopped where it holds more than there is now."""
    option = _going_on(work, capacity)
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


def _going_on(work: Work, capacity: Integers) -> Integers:
    """The newest are stopped first where the tiers above took what was theirs."""
    option = work.held.copy()
    over = used(work, option, len(capacity)) - capacity
    for job in np.argsort(-work.order, kind="stable").tolist() if (over > 0).any() else ():
        held = option[job]
        if held != WAITS and over[work.island[held]] > 0:
            over[work.island[held]] -= work.devices[held, job]
            option[job] = WAITS
    return option
