"""Start, stop and remove the attempts of one node."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.errors import FleetError, UserError
from workers.attempt import folder_setup
from workers.attempt.attempt import LocalAttempt
from workers.attempt.attempt_table import POLL_EVERY_S, AttemptTable
from workers.attempt.stopped_epochs import StoppedEpochs
from workers.attempt.supervision import supervisor_handle
from workers.attempt.supervisor_launcher import SupervisorLauncher
from workers.errors import EpochPast
from workers.protocol import lease
from workers.protocol.fence import FenceReader, FenceUnreadable
from workers.protocol.folders import AttemptFolder, AttemptId, parse
from workers.protocol.messages import PROTOCOL, InvalidMessage, Order, ScriptCheckpoint
from workers.storage import folder_removal
from workers.storage.code_archives import NodeCodeArchives
from workers.storage.data_cache import DataCache

END_OLDER_TIMEOUT_S = 10.0
"""Time for older attempts to end: longer than a cancelled attempt's grace and than the kernel takes to kill."""


class AttemptManager(AttemptTable):
    """Starts, stops and removes attempts.

    `threads(order)` is the number of threads for each rank. Thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        storage: Path,
        node: str,
        code_archives: NodeCodeArchives,
        threads: Callable[[Order], int],
        fences: FenceReader | None = None,
        launcher: SupervisorLauncher | None = None,
    ):
        super().__init__(folder, node)
        for parent in (folder, AttemptFolder(folder / "any").shared.parent):
            folder_removal.resume(parent)
        self._stopped_epochs = StoppedEpochs(folder.with_name("stopped.json"))
        for job, epoch in self._stopped_epochs.epochs().items():
            self._record_epoch(job, epoch)
        self._storage, self._code_archives, self._threads = storage, code_archives, threads
        self._data = DataCache(storage)
        self._fences, self._launcher = fences or FenceReader(), launcher or SupervisorLauncher()

    def start(self, order: Order, secrets: Mapping[str, str], interface: str = "") -> None:
        """Start the ranks of an order.

        Idempotent. Raises UserError for an invalid order, EpochPast for an attempt that was superseded or stopped,
        FleetError if its fence cannot be read.

        The lease is counted from the moment the fence was read, so an agent that was frozen before it started the ranks
        starts none: their lease has expired.
        """
        attempt = AttemptId(order.job, order.epoch, order.node_rank)
        _check_order(order, attempt)
        self._end_older(attempt)
        requested_s = lease.now_s()
        self._check_fence(attempt)
        folder = AttemptFolder(self._folder / str(attempt))
        with self._starting(attempt, folder, order) as lock:
            if lock is None:
                return
            try:
                order = folder_setup.resolve_paths(order, self._storage)
                node_context = folder_setup.NodeContext(
                    self._node, self._code_archives, self._fences.folder, os.environ, interface
                )
                with self._data.lock_data(order.data) as data, self._launcher.supervisor(folder, lock) as send_secrets:
                    folder_setup.create_folder(folder, order, node_context, self._threads(order), requested_s, data)
                    send_secrets(secrets)  # from now on the supervisor holds the locks of the data
            except (UserError, FleetError):
                self._undo(attempt, folder)
                raise
            except OSError as e:
                self._undo(attempt, folder)
                raise self._folder_error(e) from e

    def _folder_error(self, e: OSError) -> FleetError:
        return FleetError(f"node {self._node} cannot create the attempt's folder: {e}", "free disk space on that node")

    def _check_fence(self, attempt: AttemptId) -> None:
        try:
            fence = self._fences.epoch(attempt.job)
        except FenceUnreadable as e:
            raise FleetError(
                f"node {self._node} cannot check whether attempt {attempt.epoch} of {attempt.job} is current: {e}",
                "nothing to do: the server retries the start; `polyfleet doctor` shows whether Ray's head responds",
            ) from None
        if attempt.epoch < fence:
            raise EpochPast(f"attempt {attempt.epoch} of {attempt.job} was superseded by attempt {fence}", fence)

    def _check_not_superseded(self, attempt: AttemptId, folder: AttemptFolder) -> None:
        newest = self._epochs.get(attempt.job, 0)
        if newest > attempt.epoch:
            message = (
                f"attempt {attempt.epoch} of {attempt.job} was superseded: node {self._node} received attempt {newest}"
            )
            raise EpochPast(message, newest)
        if folder.removed_mark.exists():
            message = f"attempt {attempt.epoch} of {attempt.job} has already run on node {self._node}"
            raise EpochPast(message, attempt.epoch)
        if not folder.supervisor.exists() and self._stopped_epochs.contains(attempt.job, attempt.epoch):
            message = f"attempt {attempt.epoch} of {attempt.job} was stopped before it was started on this node"
            raise EpochPast(message, attempt.epoch)

    def _end_older(self, attempt: AttemptId) -> None:
        """Stop older attempts of the job: two never run here at once.

        Raises FleetError if one does not end in time.
        """
        older = [a for a in self.live_attempts() if a.id.job == attempt.job and a.id.epoch < attempt.epoch]
        for other in older:
            other.stop("fence")
        deadline_s = time.monotonic() + END_OLDER_TIMEOUT_S
        while older := [a for a in older if a.is_live]:
            if time.monotonic() >= deadline_s:
                raise FleetError(
                    f"attempt {older[0].id} is still stopping on node {self._node}",
                    "nothing to do: the server retries the start",
                )
            time.sleep(POLL_EVERY_S)
            for other in older:
                other.check_supervisor()

    @contextmanager
    def _starting(self, attempt: AttemptId, folder: AttemptFolder, order: Order) -> Iterator[int | None]:
        """Yield the lock that the supervisor will inherit, or None if there is or was a supervisor already."""
        with self._changed:
            self._check_not_superseded(attempt, folder)
            local_attempt = self._attempts.get(attempt) or LocalAttempt(attempt, folder, order.lease_s)
            try:
                folder.path.mkdir(mode=0o700, exist_ok=True)
                lock = None if local_attempt.is_starting or folder.supervisor.exists() else lease.try_lock(folder.lock)
            except OSError as e:
                with suppress(OSError):  # it is not empty if an earlier agent left files in it
                    folder.path.rmdir()
                raise self._folder_error(e) from e
            self._attempts[attempt] = local_attempt
            self._record_epoch(attempt.job, attempt.epoch)
            self._ids.setdefault(attempt.job, set()).add(attempt)
            if lock is not None and not local_attempt.mark_starting():
                os.close(lock)
                message = (
                    f"attempt {attempt.epoch} of {attempt.job} ended on node {self._node} before its ranks started"
                )
                raise EpochPast(message, attempt.epoch)
        try:
            yield lock
        finally:
            if lock is not None:
                os.close(lock)
                with self._changed:
                    local_attempt.is_starting = False
                    self._notify_waiters()

    def _undo(self, attempt: AttemptId, folder: AttemptFolder) -> None:
        """Remove the attempt's folders, and kill a supervisor that started after the start had failed."""
        if (local_attempt := self._attempts.get(attempt)) and local_attempt.supervisor.pids:
            local_attempt.supervisor.kill()
        with self._changed:
            self._attempts.pop(attempt, None)
            if group := supervisor_handle.cgroup_of(folder):
                group.remove(0.0)
            for path in (folder.shared, folder.path):  # by renaming them: a late supervisor cannot write to them
                folder_removal.remove(path)
            self._drop_id(attempt)

    def stop(self, job: str, epoch: int, how: str) -> None:
        """Stop an attempt.

        If it is not in the table, its start may still arrive and is then refused. Raises FleetError if that cannot be
        recorded on disk and no fence above its epoch prevents the start either.
        """
        attempts = self._find_or_forbid_start(job, epoch, how != "preempt")
        for attempt in attempts:
            attempt.stop(how)
        self._notify_waiters()
        self._save_stopped(attempts, job, epoch)

    def remove_rank_files(self, job: str, epoch: int) -> None:
        """Remove what its ranks wrote. Raises UserError while it runs.

        If it is not in the table, it is never started, as after `stop`.
        """
        attempts = self._find_or_forbid_start(job, epoch, False)
        for attempt in attempts:
            attempt.remove_rank_files()
            with self._changed:
                self._attempts.pop(attempt.id, None)
        self._save_stopped(attempts, job, epoch)

    def remove(self, attempts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Remove all files of these (job, epoch), logs and records included.

        Returns those removed: none that run.
        """
        return [attempt for attempt in attempts if self._remove(*attempt)]

    def _remove(self, job: str, epoch: int) -> bool:
        with self._changed:
            attempts = self._attempts_of(job, epoch)
            if any(a.is_live or a.is_starting for a in attempts):
                return False
            for attempt in attempts:
                del self._attempts[attempt.id]
            for id_here in self._ids_of(job, epoch):
                folder = AttemptFolder(self._folder / str(id_here))
                folder_removal.remove(folder.shared)
                folder_removal.remove(folder.path)
                self._drop_id(id_here)
            if job not in self._ids and not self._stopped_epochs.contains(job, 0):
                self._epochs.pop(job, None)
        return True

    def _find_or_forbid_start(self, job: str, epoch: int, final: bool) -> list[LocalAttempt]:
        """Return the job's attempts of this epoch.

        If there are none, or if `final`, note that no other may start. Both happen under the lock, so that no start
        comes between.
        """
        with self._changed:
            attempts = self._attempts_of(job, epoch)
            if (final or not attempts) and parse(f"{job}.{epoch}.0") is not None:
                self._stopped_epochs.add(job, epoch)
                self._record_epoch(job, epoch)
            return attempts

    def _save_stopped(self, attempts: list[LocalAttempt], job: str, epoch: int) -> None:
        """Save the stopped epochs.

        Raises FleetError if that fails and the stopped attempt could still be started. It cannot if there are
        `attempts`, whose own records show the stop (the next stop saves the epochs), or if a fence is above the epoch.
        """
        try:
            self._stopped_epochs.save()
        except OSError as e:
            if attempts or self._is_fenced(job, epoch):
                return
            raise FleetError(
                f"node {self._node} cannot record that attempt {epoch} of {job} was stopped: {e}",
                "free disk space on that node",
            ) from e

    def _is_fenced(self, job: str, epoch: int) -> bool:
        try:
            return self._fences.epoch(job) > epoch
        except FenceUnreadable:
            return False


def _check_order(order: Order, attempt: AttemptId) -> None:
    """Check an order. Raises UserError for one that no node can follow."""
    if order.protocol != PROTOCOL:
        raise UserError(
            f"the order has protocol {order.protocol}, this agent has {PROTOCOL}",
            "install the same Polyfleet version on server and node",
        )
    if parse(str(attempt)) != attempt:
        raise UserError(f"{order.job[:80]!r} cannot be a job's id", "use letters, digits, `.`, `_` and `-`")
    if order.task == "run" and not order.command:
        raise UserError("the run job has no command", "write what to run in `command`")
    try:
        ScriptCheckpoint.of(order.task, order.arguments)
    except InvalidMessage as e:
        raise UserError(f"the order {e}", "install the same Polyfleet version on server and node") from None
