"""All attempts of one node: those known, and how others are started, stopped, forgotten and removed."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.errors import FleetError, UserError
from workers.attempt import folder_removal, folder_setup, lease, supervisor_handle
from workers.attempt.attempt import LocalAttempt
from workers.attempt.attempt_table import LOOK_EVERY_S, AttemptTable
from workers.attempt.fence import FenceReader, FenceUnreadable
from workers.attempt.folders import AttemptFolder, AttemptId, parse
from workers.attempt.stopped_epochs import StoppedEpochs
from workers.attempt.supervisor_launcher import SupervisorLauncher
from workers.code_archives import NodeCodeArchives
from workers.data_cache import DataCache
from workers.errors import EpochPast
from workers.messages import PROTOCOL, InvalidMessage, Order, ScriptCheckpoint

END_OLDER_S = 10.0
"""Longer than a cancelled attempt's grace, and than the kernel takes to end processes."""


class AttemptManager(AttemptTable):
    """`threads(order)` says how many cores' worth of threads each rank should use. Safe to use from several threads."""

    def __init__(
        self,
        folder: Path,
        storage: Path,
        node: str,
        packages: NodeCodeArchives,
        threads: Callable[[Order], int],
        fences: FenceReader | None = None,
        starter: SupervisorLauncher | None = None,
    ):
        super().__init__(folder, node)
        for parent in (folder, AttemptFolder(folder / "any").shared.parent):
            folder_removal.resume(parent)
        self._stopped = StoppedEpochs(folder.with_name("stopped.json"))
        for job, epoch in self._stopped.epochs().items():
            self._saw(job, epoch)
        self._storage, self._packages, self._threads = storage, packages, threads
        self._data = DataCache(storage)
        self._fences, self._starter = fences or FenceReader(), starter or SupervisorLauncher()

    def start(self, order: Order, secrets: Mapping[str, str], interface: str = "") -> None:
        """Idempotent. Raises UserError for an order that cannot be followed, EpochPast for one that is past or was
        stopped, FleetError where nobody tells whether it is past.

        Its lease begins when its fence was read: an agent that is frozen before it starts the ranks starts none.
        """
        attempt = AttemptId(order.job, order.epoch, order.node_rank)
        _check(order, attempt)
        self._end_older(attempt)
        asked_s = lease.now_s()
        self._refuse_fenced(attempt)
        folder = AttemptFolder(self._folder / str(attempt))
        with self._starting(attempt, folder, order) as lock:
            if lock is None:
                return
            try:
                order = folder_setup.resolve_paths(order, self._storage)
                where = folder_setup.NodeContext(self._node, self._packages, self._fences.folder, os.environ, interface)
                with self._data.used(order.data) as data, self._starter.supervisor(folder, lock) as begin:
                    folder_setup.create_folder(folder, order, where, self._threads(order), asked_s, data)
                    begin(secrets)  # from now on the supervisor holds the data
            except (UserError, FleetError):
                self._undo(attempt, folder)
                raise
            except OSError as e:
                self._undo(attempt, folder)
                raise self._no_folder(e) from e

    def _no_folder(self, e: OSError) -> FleetError:
        return FleetError(f"node {self._node} cannot make the attempt's folder: {e}", "free space there")

    def _refuse_fenced(self, attempt: AttemptId) -> None:
        try:
            fence = self._fences.epoch(attempt.job)
        except FenceUnreadable as e:
            raise FleetError(
                f"node {self._node} cannot read whether attempt {attempt.epoch} of {attempt.job} still counts: {e}",
                "nothing to do: the server retries the start; `polyfleet doctor` shows whether Ray's head answers",
            ) from None
        if attempt.epoch < fence:
            raise EpochPast(f"attempt {attempt.epoch} of {attempt.job} was superseded by attempt {fence}", fence)

    def _refuse_past(self, attempt: AttemptId, folder: AttemptFolder) -> None:
        newest = self._epochs.get(attempt.job, 0)
        if newest > attempt.epoch:
            told = f"attempt {attempt.epoch} of {attempt.job} was superseded: {self._node} has seen attempt {newest}"
            raise EpochPast(told, newest)
        if folder.forgotten.exists():
            told = f"attempt {attempt.epoch} of {attempt.job} has run on node {self._node} and was forgotten"
            raise EpochPast(told, attempt.epoch)
        if not folder.supervisor.exists() and self._stopped.has(attempt.job, attempt.epoch):
            told = f"attempt {attempt.epoch} of {attempt.job} was stopped before it was started here"
            raise EpochPast(told, attempt.epoch)

    def _end_older(self, attempt: AttemptId) -> None:
        """Two attempts of a job never run here at once. Raises FleetError where an older one does not end in time."""
        older = [a for a in self.live() if a.id.job == attempt.job and a.id.epoch < attempt.epoch]
        for other in older:
            other.stop("fence")
        until = time.monotonic() + END_OLDER_S
        while older := [a for a in older if a.live]:
            if time.monotonic() >= until:
                raise FleetError(
                    f"attempt {older[0].id} is still stopping on node {self._node}",
                    "nothing to do: the server retries the start",
                )
            time.sleep(LOOK_EVERY_S)
            for other in older:
                other.settle()

    @contextmanager
    def _starting(self, attempt: AttemptId, folder: AttemptFolder, order: Order) -> Iterator[int | None]:
        """The lock the supervisor will inherit; None when there is or was a supervisor: then nothing is to be done."""
        with self._changed:
            self._refuse_past(attempt, folder)
            known = self._attempts.get(attempt) or LocalAttempt(attempt, folder, order.lease_s)
            try:
                folder.path.mkdir(mode=0o700, exist_ok=True)
                lock = None if known.starting or folder.supervisor.exists() else lease.try_lock(folder.lock)
            except OSError as e:
                with suppress(OSError):  # an agent before us left something there
                    folder.path.rmdir()
                raise self._no_folder(e) from e
            self._attempts[attempt] = known
            self._saw(attempt.job, attempt.epoch)
            self._ids.setdefault(attempt.job, set()).add(attempt)
            if lock is not None and not known.begin():
                os.close(lock)
                told = f"attempt {attempt.epoch} of {attempt.job} has ended on node {self._node} before it ran"
                raise EpochPast(told, attempt.epoch)
        try:
            yield lock
        finally:
            if lock is not None:
                os.close(lock)
                with self._changed:
                    known.starting = False
                    self._look_now()

    def _undo(self, attempt: AttemptId, folder: AttemptFolder) -> None:
        """Nothing is left of it, nor of a supervisor that began when nobody waited for it any more."""
        if (known := self._attempts.get(attempt)) and known.life.recorded:
            known.life.end()
        with self._changed:
            self._attempts.pop(attempt, None)
            if group := supervisor_handle.cgroup_of(folder):
                group.remove(0.0)
            for left in (folder.shared, folder.path):  # renamed: a supervisor that comes late finds nothing to write to
                folder_removal.remove(left)
            self._dropped(attempt)

    def stop(self, job: str, epoch: int, how: str) -> None:
        """Also of an attempt that is not known here: its start may still be on its way, and is refused. Raises
        FleetError where the disk takes no note of that, and no fence stands above it.
        """
        known = self._of_or_never(job, epoch, how != "preempt")
        for attempt in known:
            attempt.stop(how)
        self._look_now()
        self._note_stopped(known, job, epoch)

    def forget(self, job: str, epoch: int) -> None:
        """Raises UserError while it runs. One that is not known here is never started, as after `stop`."""
        known = self._of_or_never(job, epoch, False)
        for attempt in known:
            attempt.forget()
            with self._changed:
                self._attempts.pop(attempt.id, None)
        self._note_stopped(known, job, epoch)

    def remove(self, attempts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Nothing is left of these, jobs and epochs, logs and records included. Returns those gone: not what lives."""
        return [one for one in attempts if self._remove(*one)]

    def _remove(self, job: str, epoch: int) -> bool:
        with self._changed:
            known = self._of(job, epoch)
            if any(a.live or a.starting for a in known):
                return False
            for attempt in known:
                del self._attempts[attempt.id]
            for one in self._ids_of(job, epoch):
                folder = AttemptFolder(self._folder / str(one))
                folder_removal.remove(folder.shared)
                folder_removal.remove(folder.path)
                self._dropped(one)
            if job not in self._ids and not self._stopped.has(job, 0):
                self._epochs.pop(job, None)
        return True

    def _of_or_never(self, job: str, epoch: int, final: bool) -> list[LocalAttempt]:
        """Those known, and a note that no other is to start: if none is known, or this is `final`. At one time for all
        threads: no start comes between.
        """
        with self._changed:
            known = self._of(job, epoch)
            if (final or not known) and parse(f"{job}.{epoch}.0") is not None:
                self._stopped.add(job, epoch)
                self._saw(job, epoch)
            return known

    def _note_stopped(self, known: list[LocalAttempt], job: str, epoch: int) -> None:
        """What is known has its own record; that a part of it may never start is then noted with the next stop. What a
        fence stands above never starts, with a note or without.
        """
        try:
            self._stopped.save()
        except OSError as e:
            if known or self._is_fenced(job, epoch):
                return
            raise FleetError(f"node {self._node} cannot note what was stopped: {e}", "free space there") from e

    def _is_fenced(self, job: str, epoch: int) -> bool:
        try:
            return self._fences.epoch(job) > epoch
        except FenceUnreadable:
            return False


def _check(order: Order, attempt: AttemptId) -> None:
    """Raises UserError for an order that no node can follow."""
    if order.protocol != PROTOCOL:
        raise UserError(f"order of protocol {order.protocol}, this agent speaks {PROTOCOL}", "install the same version")
    if parse(str(attempt)) != attempt:
        raise UserError(f"{order.job[:80]!r} cannot be a job's id", "use letters, digits, `.`, `_` and `-`")
    if order.task == "run" and not order.command:
        raise UserError("a run job without a command", "say what to run in `command`")
    try:
        ScriptCheckpoint.of(order.task, order.arguments)
    except InvalidMessage as e:
        raise UserError(f"the order {e}", "install the same version") from None
