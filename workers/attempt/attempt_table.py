"""Table of the attempts in a node's folder: look them up, report their changes, renew their leases."""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from cluster.errors import Conflict, NotFound
from cluster.paths import private_dir
from workers.attempt.attempt import LocalAttempt
from workers.protocol import lease, wakeup_pipe
from workers.protocol.folders import AttemptFolder, AttemptId, parse, read_json
from workers.protocol.messages import AttemptStatus
from workers.protocol.rank_events import MAX_LINE_BYTES

POLL_EVERY_S = 0.02
RENEW_AT_MOST_EVERY_S = 0.5
MAX_REPORTED_EPOCHS = 100_000
"""Jobs whose epochs are reported to a new controller: some megabytes."""
MAX_LINES, MIN_LINES = 2000, 50
MAX_EVENT_BYTES = 1 << 20
"""Events that are read in one poll of all attempts of the node."""
FALLBACK_LEASE_S = 5.0
"""Lease of an attempt whose order cannot be read. No job has a shorter one (MIN_LEASE_S), so none is exceeded."""
LOG = logging.getLogger(__name__)


def _adopt(attempt: AttemptId, folder: AttemptFolder) -> LocalAttempt | None:
    """Return an attempt that an earlier agent started.

    None if that agent was killed before it wrote the order: then nothing has started. An attempt whose order cannot be
    read may still run on its devices. It is requested to save and stop, and its job continues in a new attempt: without
    the order the agent cannot manage it.
    """
    order: Any = read_json(folder.order)
    try:
        return LocalAttempt(attempt, folder, float(order["lease_s"]))
    except (TypeError, KeyError, ValueError):
        if not folder.order.exists():
            return None
    broken = LocalAttempt(attempt, folder, FALLBACK_LEASE_S)
    if broken.is_live:
        LOG.error("attempt %s: its order cannot be read, so it must save and stop", attempt)
        with suppress(OSError):  # the disk may be full; it then runs until the next agent stops it
            broken.stop("preempt")
    return broken


class AttemptTable:
    """Attempts of one node, by id. Holds no state that a restart would lose. Thread-safe."""

    def __init__(self, folder: Path, node: str):
        self._folder, self._node = private_dir(folder), node
        self._changed = threading.Condition(threading.RLock())
        self._epochs: dict[str, int] = {}
        self._ids: dict[str, set[AttemptId]] = {}  # of all attempts with a folder here, by job
        names = sorted(entry.name for entry in os.scandir(folder))
        self._attempts = {a.id: a for a in self._load(names)}
        self._renewed_s = 0.0
        self._wakes = self._changes = 0
        wakeup_pipe.watch(folder, self, AttemptTable._notify_waiters)

    def _load(self, names: list[str]) -> Iterator[LocalAttempt]:
        """Yield the attempts that an earlier agent left. Being in the table is all that a running one needs."""
        for name in names:
            folder, attempt = AttemptFolder(self._folder / name), parse(name)
            if attempt is None:
                continue
            self._record_epoch(attempt.job, attempt.epoch)
            self._ids.setdefault(attempt.job, set()).add(attempt)
            if folder.removed_mark.exists():
                continue
            if local_attempt := _adopt(attempt, folder):
                yield local_attempt

    def _record_epoch(self, job: str, epoch: int) -> None:
        """Record an epoch of a job, and move the job to the end: the newest jobs come last."""
        self._epochs[job] = max(epoch, self._epochs.pop(job, 0))

    def _ids_of(self, job: str, epoch: int) -> list[AttemptId]:
        """Ids by node rank, including attempts whose folders of ranks were removed."""
        with self._changed:
            return sorted(attempt for attempt in self._ids.get(job, ()) if attempt.epoch == epoch)

    def _drop_id(self, attempt: AttemptId) -> None:
        """Drop the id of an attempt whose folder was removed."""
        with self._changed:
            ids = self._ids.get(attempt.job, set())
            ids.discard(attempt)
            if not ids:
                self._ids.pop(attempt.job, None)

    def epochs(self) -> dict[str, int]:
        """The highest epoch of each job that this node has received, for the newest MAX_REPORTED_EPOCHS jobs."""
        with self._changed:
            return dict(islice(reversed(self._epochs.items()), MAX_REPORTED_EPOCHS))

    def log(self, job: str, epoch: int, rank: int, offset: int, limit_bytes: int) -> dict[str, Any]:
        """Read a rank's log; see LocalAttempt.log. Raises NotFound for an attempt that this node never had."""
        return self._attempt_with_log(job, epoch, rank).log(rank, offset, limit_bytes)

    def log_tail(self, job: str, epoch: int, rank: int, count: int) -> dict[str, int]:
        return self._attempt_with_log(job, epoch, rank).log_tail(rank, count)

    def _attempt_with_log(self, job: str, epoch: int, rank: int) -> LocalAttempt:
        """The part of the attempt whose rank this is: of several node ranks here, only one has its log."""
        ids = self._ids_of(job, epoch)
        if not ids:
            raise NotFound(f"this node never ran attempt {epoch} of {job}", "`polyfleet show` lists its nodes")
        folders = [(a, AttemptFolder(self._folder / str(a))) for a in ids]
        attempt, folder = next(((a, f) for a, f in folders if f.log(rank).exists()), folders[0])
        return LocalAttempt(attempt, folder, 0.0)

    def folder(self, job: str, epoch: int) -> Path:
        """Folder that the ranks of the attempt write to, of its first part on this node. Raises NotFound."""
        attempts = self._attempts_of(job, epoch)
        if not attempts:
            raise NotFound(
                f"attempt {epoch} of {job} does not run on node {self._node}", "`polyfleet show` lists its nodes"
            )
        return attempts[0].folder.shared

    def checkpoints_to_keep(self, job: str) -> int | None:
        """How many checkpoints the newest attempt of a job here keeps; None if the node does not know the job."""
        with self._changed:
            attempts = sorted((a for a in self._attempts.values() if a.id.job == job), key=lambda a: a.id.epoch)
        order: Any = read_json(attempts[-1].folder.order) if attempts else None
        return int(order["keep_checkpoints"]) if order else None

    def running_folder(self, job: str, epoch: int, rank: int) -> AttemptFolder:
        """Folder of the attempt that runs this rank here. Raises NotFound; Conflict if it is not running."""
        for attempt in self._attempts_of(job, epoch):
            order: Any = read_json(attempt.folder.order)
            if order is None or not order["first_rank"] <= rank < order["first_rank"] + order["ranks"]:
                continue
            if (phase := attempt.phase) != "running":
                raise Conflict(
                    f"attempt {epoch} of {job} is {phase} on node {self._node}", "`polyfleet show` shows its state"
                )
            return attempt.folder
        raise NotFound(f"rank {rank} of {job} does not run on node {self._node}", "`polyfleet show` lists its nodes")

    def _attempts_of(self, job: str, epoch: int) -> list[LocalAttempt]:
        with self._changed:
            return [a for a in self._attempts.values() if (a.id.job, a.id.epoch) == (job, epoch)]

    def unusable_data(self) -> dict[str, dict[str, Any]]:
        """Attempts whose ranks wrote data that cannot be used: {key: {"count", "reason"}}."""
        with self._changed:
            attempts = list(self._attempts.values())
        return {str(a.id): problem for a in attempts if (problem := a.unusable_data)}

    def keys(self) -> list[str]:
        """Keys of all attempts in the table."""
        with self._changed:
            return [str(attempt) for attempt in self._attempts]

    def live_attempts(self) -> list[LocalAttempt]:
        with self._changed:
            attempts = list(self._attempts.values())
        return [a for a in attempts if a.is_live]

    def ended_attempts(self) -> list[tuple[str, int]]:
        """The newest (job, epoch) of each job that ran here, if it has ended on this node."""
        with self._changed:
            newest = {job: max(attempt.epoch for attempt in ids) for job, ids in self._ids.items()}
            attempts = list(self._attempts.values())
        live = {(a.id.job, a.id.epoch) for a in attempts if a.is_live or a.is_starting}
        return [attempt for attempt in newest.items() if attempt not in live]

    def renew(self, requested_s: float | None = None) -> None:
        """Renew all leases in full from `requested_s` on, the time of the controller's call (default: now)."""
        requested_s = None if requested_s is None else min(requested_s, lease.now_s())
        if time.monotonic() - self._renewed_s >= RENEW_AT_MOST_EVERY_S:
            self._renewed_s = time.monotonic()
            for attempt in self.live_attempts():
                if attempt.unreadable:
                    continue  # if its supervisor does not stop it, it ends with its lease
                try:
                    attempt.renew(requested_s)
                except OSError as e:
                    LOG.error("attempt %s: its lease cannot be written: %s", attempt.id, e)

    def wait_for_changes(
        self, cursors: Mapping[str, int], last_phases: Mapping[str, str], timeout_s: float, gather_s: float = 0.0
    ) -> list[AttemptStatus]:
        """Wait for changes and return the statuses of all changed attempts.

        Returns as soon as one has another phase than in `last_phases`, or after `gather_s` if there are events; []
        after `timeout_s`, or once `interrupt_wait` was called.
        """
        started_s, wakes = time.monotonic(), self._wakes
        while True:
            rings = self._changes
            statuses, live = self._poll(cursors, last_phases)
            waited_s = time.monotonic() - started_s
            phase_changed = any(status.phase != last_phases.get(status.key) for status in statuses)
            if phase_changed or waited_s >= timeout_s or self._wakes != wakes or (statuses and waited_s >= gather_s):
                return statuses
            left_s = (min(gather_s, timeout_s) if statuses else timeout_s) - waited_s
            with self._changed:
                if self._changes == rings:  # else something changed during the poll, which may have missed it
                    self._changed.wait(min(left_s, POLL_EVERY_S) if live and not statuses else left_s)

    def _notify_waiters(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def interrupt_wait(self) -> None:
        """Let `wait_for_changes` return at once: something about the node itself has changed."""
        with self._changed:
            self._wakes += 1
            self._notify_waiters()

    def _poll(self, cursors: Mapping[str, int], last_phases: Mapping[str, str]) -> tuple[list[AttemptStatus], bool]:
        """Poll all attempts once, with equal shares of the limits.

        Returns the changed ones, and whether others may change without a wake-up.
        """
        with self._changed:
            attempts = list(self._attempts.values())
        share = max(1, len(attempts))
        statuses = [
            self._poll_attempt(a, cursors.get(str(a.id), 0), last_phases.get(str(a.id), ""), share) for a in attempts
        ]
        return [status for status in statuses if status is not None], any(a.is_live or a.is_draining for a in attempts)

    def _poll_attempt(self, attempt: LocalAttempt, cursor: int, last_phase: str, share: int) -> AttemptStatus | None:
        """Poll one attempt. An error with it does not affect the others."""
        lines, size = max(MIN_LINES, MAX_LINES // share), max(2 * MAX_LINE_BYTES, MAX_EVENT_BYTES // share)
        try:
            attempt.check_supervisor()
            if attempt.is_removed:
                with self._changed:
                    self._attempts.pop(attempt.id, None)
                    self._drop_id(attempt.id)
                return None
            return attempt.status_if_changed(cursor, last_phase, lines, size)
        except OSError as e:  # the node's fault: no disk space, no file descriptors
            attempt.log_check_failure(str(e))
        except Exception as e:
            LOG.exception("attempt %s", attempt.id)
            attempt.mark_unreadable(f"files that its ranks wrote cannot be processed: {e!r}")
        return None
