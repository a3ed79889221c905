"""The second way a lease is renewed: the controller is silent, but a place it also writes to says nobody took over.

The place holds, per job, the newest epoch. Whoever places a job anew first writes the new epoch there.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress

from workers.attempt import lease
from workers.attempt.attempt import Attempt


class Unreadable(Exception):
    """The place cannot be asked now: nothing is known, so nothing is renewed."""


def check(attempts: Iterable[Attempt], newest_epoch: Callable[[str], int | None]) -> None:
    """Renew each attempt that is not fenced off, cancel each that is.

    `newest_epoch` gives a job's newest epoch, None when none was written. An answer counts from when it was asked for,
    so a slow one cannot stretch a lease.
    """
    for attempt in attempts:
        asked_s = lease.now_s()
        with suppress(Unreadable):
            newest = newest_epoch(attempt.id.job)
            if newest is not None and newest > attempt.id.epoch:
                attempt.stop("cancel")
            else:
                lease.renew(attempt.folder.lease, attempt.lease_s, asked_s)
