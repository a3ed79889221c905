"""All attempts of one node: started, watched, stopped, adopted. Nothing is kept here that a restart would lose."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.errors import Conflict, FleetError, NotFound, UserError
from cluster.paths import private_dir
from workers.attempt import launch, lease, life, removal
from workers.attempt.attempt import Attempt
from workers.attempt.fence import Fences, Unreadable
from workers.attempt.records import AttemptId, Folder, parse, read_json
from workers.attempt.starting import Starter
from workers.attempt.stopped import Stopped
from workers.job_events import LONGEST_LINE_BYTES
from workers.messages import PROTOCOL, AttemptReport, Order
from workers.packages import Packages

LOOK_EVERY_S = 0.02
RENEW_AT_MOST_EVERY_S = 0.5
MOST_LINES, LEAST_LINES = 2000, 50
MOST_BYTES = 1 << 20
"""Of events, read in one look at all attempts of the node."""
LOG = logging.getLogger(__name__)


class Attempts:
    """`threads(order)` says how many cores' worth of threads each rank should use. Safe to use from several threads."""

    def __init__(
        self,
        folder: Path,
        storage: Path,
        node: str,
        packages: Packages,
        threads: Callable[[Order], int],
        fences: Fences | None = None,
        starter: Starter | None = None,
    ):
        self._folder = private_dir(folder)
        self._starter = starter or Starter()
        self._fences = fences or Fences()
        self._stopped = Stopped(folder.with_name("stopped.json"))
        removal.resume(Folder(folder / "any").shared.parent)
        self._storage = storage
        self._node = node
        self._packages = packages
        self._threads = threads
        self._changed = threading.Condition(threading.RLock())
        names = sorted(entry.name for entry in os.scandir(folder))
        self._epochs = self._stopped.epochs()
        self._attempts = {a.id: a for a in self._on_disk(names)}
        self._renewed_s = 0.0
        self._wakes = 0

    def _on_disk(self, names: list[str]) -> Iterator[Attempt]:
        """What an agent before us left: running attempts are adopted by knowing them."""
        for name in names:
            folder, attempt = Folder(self._folder / name), parse(name)
            if attempt is None:
                continue
            self._epochs[attempt.job] = max(attempt.epoch, self._epochs.get(attempt.job, 0))
            if folder.forgotten.exists():
                continue
            order = read_json(folder.order)
            try:
                yield Attempt(attempt, folder, float(order["lease_s"]))
            except (TypeError, KeyError, ValueError):
                LOG.error("attempt %s: its order cannot be read; it ends with its lease", attempt)

    def start(self, order: Order, secrets: Mapping[str, str]) -> None:
        """Idempotent. Raises UserError for an order that cannot be followed, Conflict for an epoch that is past or was
        stopped, FleetError where nobody tells whether it is past.

        Its lease begins when its fence was read: an agent that is frozen before it starts the ranks starts none.
        """
        attempt = AttemptId(order.job, order.epoch, order.node_rank)
        _check(order, attempt)
        asked_s = lease.now_s()
        self._refuse_fenced(attempt)
        folder = Folder(self._folder / str(attempt))
        with self._starting(attempt, folder, order) as lock:
            if lock is None:
                return
            self._end_older(attempt)
            try:
                order = launch.absolute(order, self._storage)
                where = launch.Where(self._node, self._packages, self._fences.folder, os.environ)
                with self._starter.supervisor(folder, lock) as begin:
                    launch.prepare(folder, order, where, self._threads(order), asked_s)
                    begin(secrets)
            except (UserError, FleetError):
                self._undo(attempt, folder)
                raise
            except OSError as e:
                self._undo(attempt, folder)
                raise FleetError(f"node {self._node} cannot make the attempt's folder: {e}", "free space there") from e

    def _refuse_fenced(self, attempt: AttemptId) -> None:
        try:
            fence = self._fences.epoch(attempt.job)
        except Unreadable as e:
            raise FleetError(
                f"whether epoch {attempt.epoch} of {attempt.job} still counts cannot be read on node {self._node}: {e}",
                "it is tried again; Ray's head must answer",
            ) from None
        if attempt.epoch < fence:
            raise Conflict(f"epoch {attempt.epoch} of {attempt.job} is past: epoch {fence} has taken over")

    def _refuse_past(self, attempt: AttemptId, folder: Folder) -> None:
        newest = self._epochs.get(attempt.job, 0)
        if newest > attempt.epoch:
            raise Conflict(f"epoch {attempt.epoch} of {attempt.job} is past: this node has seen epoch {newest}")
        if folder.forgotten.exists():
            raise Conflict(f"epoch {attempt.epoch} of {attempt.job} has run on node {self._node} and was forgotten")
        if not folder.supervisor.exists() and self._stopped.has(attempt.job, attempt.epoch):
            raise Conflict(f"epoch {attempt.epoch} of {attempt.job} was stopped before it was started here")

    def _end_older(self, attempt: AttemptId) -> None:
        with self._changed:
            older = [a for a in self._attempts.values() if a.id.job == attempt.job and a.id.epoch < attempt.epoch]
        for other in older:
            other.stop("cancel")

    def epochs(self) -> dict[str, int]:
        """The highest epoch that this node has seen of each job."""
        with self._changed:
            return dict(self._epochs)

    @contextmanager
    def _starting(self, attempt: AttemptId, folder: Folder, order: Order) -> Iterator[int | None]:
        """The lock the supervisor will inherit; None when there is or was a supervisor: then nothing is to be done."""
        with self._changed:
            self._refuse_past(attempt, folder)
            folder.path.mkdir(mode=0o700, exist_ok=True)
            self._epochs[attempt.job] = attempt.epoch
            known = self._attempts.setdefault(attempt, Attempt(attempt, folder, order.lease_s))
            lock = None if known.starting or folder.supervisor.exists() else lease.hold(folder.lock)
            if lock is not None and not known.begin():
                os.close(lock)
                raise Conflict(f"epoch {attempt.epoch} of {attempt.job} has ended on node {self._node} before it ran")
        try:
            yield lock
        finally:
            if lock is not None:
                os.close(lock)
                with self._changed:
                    known.starting = False
                    self._changed.notify_all()

    def _undo(self, attempt: AttemptId, folder: Folder) -> None:
        with self._changed:
            self._attempts.pop(attempt, None)
            if group := life.group_of(folder):
                group.remove(0.0)
            removal.remove(folder.shared)
            shutil.rmtree(folder.path, ignore_errors=True)

    def stop(self, job: str, epoch: int, how: str) -> None:
        """Also of an attempt that is not known here: its start may still be on its way, and is refused. Raises
        FleetError where the disk takes no note of that.
        """
        known = self._of_or_never(job, epoch, how == "cancel")
        for attempt in known:
            attempt.stop(how)
        with self._changed:
            self._changed.notify_all()
        self._note_stopped(known)

    def forget(self, job: str, epoch: int) -> None:
        """Raises UserError while it runs. One that is not known here is never started, as after `stop`."""
        known = self._of_or_never(job, epoch, False)
        for attempt in known:
            attempt.forget()
            with self._changed:
                self._attempts.pop(attempt.id, None)
        self._note_stopped(known)

    def _of_or_never(self, job: str, epoch: int, final: bool) -> list[Attempt]:
        """Those known, and a note that no other is to start: if none is known, or this is `final`. At one time for all
        threads: no start comes between.
        """
        with self._changed:
            known = self._of(job, epoch)
            if (final or not known) and parse(f"{job}.{epoch}.0") is not None:
                self._stopped.add(job, epoch)
                self._epochs[job] = max(epoch, self._epochs.get(job, 0))
            return known

    def _note_stopped(self, known: list[Attempt]) -> None:
        """What is known has its own record; that a part of it may never start is then noted with the next stop."""
        try:
            self._stopped.save()
        except OSError as e:
            if known:
                return
            raise FleetError(f"node {self._node} cannot note what was stopped: {e}", "free space there") from e

    def log(self, job: str, epoch: int, rank: int, offset: int, limit_bytes: int) -> dict[str, Any]:
        """Also of attempts that are forgotten. Raises NotFound for one this node never had."""
        return self._logged(job, epoch, rank).log(rank, offset, limit_bytes)

    def log_tail(self, job: str, epoch: int, rank: int, count: int) -> dict[str, int]:
        return self._logged(job, epoch, rank).log_tail(rank, count)

    def _logged(self, job: str, epoch: int, rank: int) -> Attempt:
        """That of the node ranks whose log it is; the others, if there are any, have none."""
        prefix = f"{job}.{epoch}."
        names = sorted(e.name for e in os.scandir(self._folder) if e.name.startswith(prefix))
        ids = [a for name in names if (a := parse(name)) is not None and a.job == job]
        if not ids:
            raise NotFound(f"this node never ran epoch {epoch} of {job}", "`show` says on which node it ran")
        folders = [(a, Folder(self._folder / str(a))) for a in ids]
        attempt, folder = next(((a, f) for a, f in folders if f.log(rank).exists()), folders[0])
        return Attempt(attempt, folder, 0.0)

    def folder(self, job: str, epoch: int) -> Path:
        """Where the ranks of the first attempt here write. Raises NotFound."""
        attempts = self._of(job, epoch)
        if not attempts:
            raise NotFound(f"epoch {epoch} of {job} does not run on node {self._node}", "`show` says where it runs")
        return attempts[0].folder.shared

    def _of(self, job: str, epoch: int) -> list[Attempt]:
        with self._changed:
            return [a for a in self._attempts.values() if (a.id.job, a.id.epoch) == (job, epoch)]

    def poison(self) -> dict[str, dict[str, Any]]:
        """Of each attempt whose ranks wrote what cannot be used: {key: {"count", "reason"}}."""
        with self._changed:
            known = list(self._attempts.values())
        return {str(a.id): told for a in known if (told := a.poison)}

    def known(self) -> list[str]:
        """Keys of all attempts that are not forgotten."""
        with self._changed:
            return [str(attempt) for attempt in self._attempts]

    def live(self) -> list[Attempt]:
        with self._changed:
            known = list(self._attempts.values())
        return [a for a in known if a.live]

    def renew(self, asked_s: float | None = None) -> None:
        """Give every living attempt its full lease, from `asked_s` on (default: now): then the controller spoke."""
        asked_s = None if asked_s is None else min(asked_s, lease.now_s())
        if time.monotonic() - self._renewed_s >= RENEW_AT_MOST_EVERY_S:
            self._renewed_s = time.monotonic()
            for attempt in self.live():
                if attempt.unreadable:
                    continue  # it ends with its lease, if its supervisor does not obey
                try:
                    attempt.renew(asked_s)
                except OSError as e:
                    LOG.error("attempt %s: its lease cannot be written: %s", attempt.id, e)

    def news(self, cursors: Mapping[str, int], known: Mapping[str, str], timeout_s: float) -> list[AttemptReport]:
        """Of all attempts with news, as soon as there is one; [] after `timeout_s`, or once `wake` was called."""
        until, wakes = time.monotonic() + timeout_s, self._wakes
        while True:
            reports, live = self._look(cursors, known)
            left = until - time.monotonic()
            if reports or left <= 0 or self._wakes != wakes:
                return reports
            with self._changed:
                self._changed.wait(min(left, LOOK_EVERY_S) if live else left)

    def wake(self) -> None:
        """There is news of the node itself: whoever waits for news is answered."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def _look(self, cursors: Mapping[str, int], known: Mapping[str, str]) -> tuple[list[AttemptReport], bool]:
        """News, and whether there may be some without anybody's asking. Each attempt gets the same share of a look."""
        with self._changed:
            attempts = list(self._attempts.values())
        share = max(1, len(attempts))
        found = [self._ask(a, cursors.get(str(a.id), 0), known.get(str(a.id), ""), share) for a in attempts]
        return [report for report in found if report is not None], any(a.live or a.draining for a in attempts)

    def _ask(self, attempt: Attempt, cursor: int, known: str, share: int) -> AttemptReport | None:
        """What goes wrong with one attempt stops no other."""
        lines, size = max(LEAST_LINES, MOST_LINES // share), max(2 * LONGEST_LINE_BYTES, MOST_BYTES // share)
        try:
            attempt.settle()
            if attempt.gone:
                with self._changed:
                    self._attempts.pop(attempt.id, None)
                return None
            return attempt.report(cursor, known, lines, size)
        except OSError as e:  # of the node: no space, no descriptors
            attempt.trouble(str(e))
        except Exception as e:
            LOG.exception("attempt %s", attempt.id)
            attempt.spoil(f"what its ranks wrote cannot be followed: {e!r}")
        return None


def _check(order: Order, attempt: AttemptId) -> None:
    """Raises UserError for an order that no node can follow."""
    if order.protocol != PROTOCOL:
        raise UserError(f"order of protocol {order.protocol}, this agent speaks {PROTOCOL}", "install the same version")
    if parse(str(attempt)) != attempt:
        raise UserError(f"{order.job[:80]!r} cannot be a job's id", "use letters, digits, `.`, `_` and `-`")
    if order.task == "run" and not order.command:
        raise UserError("a run job without a command", "say what to run in `command`")
