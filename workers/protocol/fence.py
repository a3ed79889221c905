"""Read fences. The fence of a job is the epoch below which attempts are superseded.

To place a job again, the controller first raises its fence, then waits until earlier leases have expired. An agent
reads the fence before it starts an attempt. A fence is also the second means to renew a lease: when the controller is
silent, it shows that no newer attempt was placed.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cluster.errors import UserError
from cluster.host import fences
from workers.protocol import lease
from workers.protocol.messages import FENCE_KEY

if TYPE_CHECKING:
    from workers.attempt.attempt import LocalAttempt

LOG = logging.getLogger(__name__)
MAX_FENCE_BYTES = 32
STORE_TIMEOUT_S = 3.0
"""Time limit of a request to Ray's store, unless a lease expires sooner."""
STORE_RETRY_S = 2.0
"""Time without requests after the store did not respond: each one takes seconds, and each attempt needs one."""
SHARE_OF_LEASE = 1 / 3
SHARE_OF_LEASE_WITH_FOLDER = 1 / 10
"""Share of a lease for a request to the store where the folder can be read, too. A head that is starting accepts
connections but does not respond. Leases that the folder can renew must not expire during the request: the server may
have been silent for a third of one, and a second more.
"""


class FenceUnreadable(Exception):
    """No source of fences can be read now, so nothing may be started or renewed."""


class FenceReading(NamedTuple):
    """A fence as it was read. `requested_s`: when the earliest request that got a reply was sent."""

    epoch: int
    requested_s: float


class FenceReader:
    """Reads fences from Ray's store and from a folder; the higher of the two counts.

    `stored(key, limit_s)` reads a key of Ray's store and may raise FenceUnreadable; the server writes `folder` for
    nodes of its own machine. Without either, as without Ray, there are no fences.
    """

    def __init__(
        self, fleet: str = "", folder: Path | None = None, stored: Callable[[str, float], bytes | None] | None = None
    ):
        self.folder = folder
        self._fleet, self._read_store = fleet, stored
        self._retry_at_s = 0.0

    def epoch(self, job: str) -> int:
        """The job's fence, 0 if none was raised. Raises FenceUnreadable if no source responds."""
        return self.read(job, float("inf")).epoch

    def read(self, job: str, lease_s: float) -> FenceReading:
        """Read a fence, like `epoch`, within a time that allows to renew a lease of `lease_s`."""
        epochs, reason, started_s = [], "", lease.now_s()
        for read in (self._in_store, self._in_folder):
            requested_s = lease.now_s()
            try:
                epochs.append((read(job, lease_s), requested_s))
            except FenceUnreadable as e:
                reason = reason or str(e)
        readings = [FenceReading(epoch, requested_s) for epoch, requested_s in epochs if epoch is not None]
        if reason and not readings:
            raise FenceUnreadable(reason)
        return FenceReading(
            max((reading.epoch for reading in readings), default=0),
            min((reading.requested_s for reading in readings), default=started_s),
        )

    def _in_store(self, job: str, lease_s: float) -> int | None:
        """Read the fence from Ray's store; None without a store."""
        if self._read_store is None:
            return None
        if self.folder is not None and time.monotonic() < self._retry_at_s:
            raise FenceUnreadable("Ray's head did not respond to the last request")
        limit_s = min(STORE_TIMEOUT_S, lease_s * (SHARE_OF_LEASE_WITH_FOLDER if self.folder else SHARE_OF_LEASE))
        try:
            return _parse_epoch(self._read_store(FENCE_KEY.format(fleet=self._fleet, job=job), limit_s))
        except FenceUnreadable:
            self._retry_at_s = time.monotonic() + STORE_RETRY_S
            raise

    def _in_folder(self, job: str, _lease_s: float) -> int | None:
        return None if self.folder is None else read_folder(self.folder, job)


def read_folder(folder: Path, job: str) -> int:
    """Read a fence from the folder, 0 if none was raised.

    Raises FenceUnreadable, also if there is no folder.
    """
    try:
        epoch = fences.read(folder, job)
    except UserError as e:
        raise FenceUnreadable(str(e)) from None
    if epoch is None and not folder.is_dir():
        raise FenceUnreadable(f"{folder} does not exist")
    return epoch or 0


def _parse_epoch(text: bytes | None) -> int:
    if text is None:
        return 0
    if not text.strip().isdigit():
        raise FenceUnreadable(f"a fence contains {text[:MAX_FENCE_BYTES]!r}, which is not an epoch")
    return int(text)


def renew_or_stop(attempts: "Iterable[LocalAttempt]", reader: FenceReader) -> None:
    """Renew the attempts that are current and stop those that were superseded.

    An error with one attempt is logged and does not affect the others. A lease is renewed from the time of the request,
    so a slow reply cannot extend it.
    """
    attempts = list(attempts)
    shortest_s = min((attempt.lease_s for attempt in attempts), default=0.0)
    for attempt in attempts:
        try:
            _renew_or_stop_one(attempt, reader, shortest_s)
        except Exception:
            LOG.exception("attempt %s: its lease was not renewed", attempt.id)


def _renew_or_stop_one(attempt: "LocalAttempt", fences: FenceReader, lease_s: float) -> None:
    with suppress(FenceUnreadable):
        epoch, requested_s = fences.read(attempt.id.job, lease_s)
        if epoch > attempt.id.epoch:
            LOG.warning("attempt %s is stopped: attempt %d of its job has superseded it", attempt.id, epoch)
            attempt.stop("fence")
        elif not attempt.unreadable:
            attempt.renew(requested_s)
