"""The second way a lease is renewed: the controller is silent, but a place it also writes to says nobody took over.

The place holds, per job, the newest epoch. Whoever places a job anew first writes the new epoch there.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from workers.attempt import lease
from workers.attempt.attempt import Attempt

LOG = logging.getLogger(__name__)


class Unreadable(Exception):
    """The place cannot be asked now: nothing is known, so nothing is renewed."""


def check(attempts: Iterable[Attempt], newest_epoch: Callable[[str], int | None]) -> None:
    """Renew each attempt that is not fenced off, cancel each that is. What goes wrong with one is logged, and concerns
    that one alone.

    `newest_epoch` gives a job's newest epoch, None when none was written. An answer counts from when it was asked for,
    so a slow one cannot stretch a lease.
    """
    for attempt in attempts:
        try:
            _check(attempt, newest_epoch)
        except Exception:
            LOG.exception("attempt %s: its lease was not renewed", attempt.id)


def _check(attempt: Attempt, newest_epoch: Callable[[str], int | None]) -> None:
    asked_s = lease.now_s()
    with suppress(Unreadable):
        newest = newest_epoch(attempt.id.job)
        if newest is not None and newest > attempt.id.epoch:
            attempt.stop("cancel")
        else:
            attempt.renew(asked_s)
