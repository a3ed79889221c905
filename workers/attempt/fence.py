"""Fences: per job the epoch below which nothing an attempt does counts any more. Whoever places a job anew raises its
fence first, and waits until the leases given before have passed.

An agent reads the fence before it starts anything. It is also the second way a lease is renewed: the controller is
silent, but a place that it writes to says that nobody took over.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cluster import fences
from cluster.errors import UserError
from workers.attempt import lease
from workers.messages import FENCE_KEY

if TYPE_CHECKING:
    from workers.attempt.attempt import LocalAttempt

LOG = logging.getLogger(__name__)
LONGEST_BYTES = 32
STORE_LIMIT_S = 3.0
"""How long the store may take to answer, unless a lease passes sooner."""
STORE_REST_S = 2.0
"""After the store did not answer: asking takes seconds, and every attempt of the node is asked for in turn."""
SHARE_OF_LEASE = 1 / 3
SHARE_BESIDE_FOLDER = 1 / 10
"""A head that is just being started accepts connections and does not answer. Leases that the folder renews must not
pass while the store is asked: the server may have been silent for a third of one, and a second more.
"""


class FenceUnreadable(Exception):
    """No place can be asked now: nothing is known, so nothing is started or renewed."""


class FenceReading(NamedTuple):
    """A fence as it was read. `asked_s`: when the earliest place that answered was asked."""

    epoch: int
    asked_s: float


class FenceReader:
    """`stored` gets a key from Ray's store within so many seconds and may raise Unreadable; `folder` is where the
    server writes them for nodes of its own machine. The higher of the two counts. Without any place, as without Ray,
    there is no fence.
    """

    def __init__(
        self, fleet: str = "", folder: Path | None = None, stored: Callable[[str, float], bytes | None] | None = None
    ):
        self.folder = folder
        self._fleet, self._stored = fleet, stored
        self._rest_until_s = 0.0

    def epoch(self, job: str) -> int:
        """0 where none was raised. Raises FenceUnreadable when no place answers."""
        return self.known(job, float("inf")).epoch

    def known(self, job: str, lease_s: float) -> FenceReading:
        """As `epoch`, soon enough to renew a lease of that length."""
        found, why, begun_s = [], "", lease.now_s()
        for read in (self._in_store, self._in_folder):
            asked_s = lease.now_s()
            try:
                found.append((read(job, lease_s), asked_s))
            except FenceUnreadable as e:
                why = why or str(e)
        known = [FenceReading(epoch, asked_s) for epoch, asked_s in found if epoch is not None]
        if why and not known:
            raise FenceUnreadable(why)
        return FenceReading(max((k.epoch for k in known), default=0), min((k.asked_s for k in known), default=begun_s))

    def _in_store(self, job: str, lease_s: float) -> int | None:
        """None without a store."""
        if self._stored is None:
            return None
        if self.folder is not None and time.monotonic() < self._rest_until_s:
            raise FenceUnreadable("Ray's head did not answer just now")
        limit_s = min(STORE_LIMIT_S, lease_s * (SHARE_BESIDE_FOLDER if self.folder else SHARE_OF_LEASE))
        try:
            return _number(self._stored(FENCE_KEY.format(fleet=self._fleet, job=job), limit_s))
        except FenceUnreadable:
            self._rest_until_s = time.monotonic() + STORE_REST_S
            raise

    def _in_folder(self, job: str, _lease_s: float) -> int | None:
        return None if self.folder is None else read_folder(self.folder, job)


def read_folder(folder: Path, job: str) -> int:
    """0 where none was raised. Raises FenceUnreadable, also where the folder is missing."""
    try:
        found = fences.read(folder, job)
    except UserError as e:
        raise FenceUnreadable(str(e)) from None
    if found is None and not folder.is_dir():
        raise FenceUnreadable(f"{folder} does not exist")
    return found or 0


def _number(text: bytes | None) -> int:
    if text is None:
        return 0
    if not text.strip().isdigit():
        raise FenceUnreadable(f"a fence holds {text[:LONGEST_BYTES]!r}, which is not an epoch")
    return int(text)


def renew_or_stop(attempts: "Iterable[LocalAttempt]", known: FenceReader) -> None:
    """Renew each attempt that is not fenced off, end each that is. What goes wrong with one is logged, and concerns
    that one alone. An answer counts from when it was asked for, so a slow one cannot stretch a lease.
    """
    attempts = list(attempts)
    shortest_s = min((attempt.lease_s for attempt in attempts), default=0.0)
    for attempt in attempts:
        try:
            _check(attempt, known, shortest_s)
        except Exception:
            LOG.exception("attempt %s: its lease was not renewed", attempt.id)


def _check(attempt: "LocalAttempt", fences: FenceReader, lease_s: float) -> None:
    with suppress(FenceUnreadable):
        epoch, asked_s = fences.known(attempt.id.job, lease_s)
        if epoch > attempt.id.epoch:
            LOG.warning("attempt %s ends: attempt %d of its job has superseded it", attempt.id, epoch)
            attempt.stop("fence")
        elif not attempt.unreadable:
            attempt.renew(asked_s)
