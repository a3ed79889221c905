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
from workers.attempt.records import AttemptId, Folder, parse, read_json
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

    def __init__(self, folder: Path, storage: Path, node: str, packages: Packages, threads: Callable[[Order], int]):
        self._folder = private_dir(folder)
        removal.resume(Folder(folder / "any").shared.parent)
        self._storage = storage
        self._node = node
        self._packages = packages
        self._threads = threads
        self._changed = threading.Condition(threading.RLock())
        self._attempts = {a.id: a for a in self._on_disk()}
        self._renewed_s = 0.0

    def _on_disk(self) -> Iterator[Attempt]:
        """What an agent before us left: running attempts are adopted by knowing them."""
        for path in sorted(self._folder.iterdir()):
            folder, attempt = Folder(path), parse(path.name)
            if attempt is None or folder.forgotten.exists():
                continue
            order = read_json(folder.order)
            try:
                yield Attempt(attempt, folder, float(order["lease_s"]))
            except (TypeError, KeyError, ValueError):
                LOG.error("attempt %s: its order cannot be read; it ends with its lease", attempt)

    def start(self, order: Order, secrets: Mapping[str, str]) -> None:
        """Idempotent. Raises UserError for an order that cannot be followed, Conflict for an epoch that is past."""
        attempt = AttemptId(order.job, order.epoch, order.node_rank)
        self._check(order, attempt)
        folder = Folder(self._folder / str(attempt))
        with self._starting(attempt, folder, order) as lock:
            if lock is None:
                return
            try:
                order = launch.absolute(order, self._storage)
                with launch.supervisor(folder, lock) as begin:
                    launch.prepare(folder, order, self._node, self._threads(order), self._packages, os.environ)
                    begin(secrets)
            except (UserError, FleetError):
                self._undo(attempt, folder)
                raise
            except OSError as e:
                self._undo(attempt, folder)
                raise FleetError(f"node {self._node} cannot make the attempt's folder: {e}", "free space there") from e

    def _check(self, order: Order, attempt: AttemptId) -> None:
        if order.protocol != PROTOCOL:
            raise UserError(
                f"order of protocol {order.protocol}, this agent speaks {PROTOCOL}", "install the same version"
            )
        if parse(str(attempt)) != attempt:
            raise UserError(f"{order.job[:80]!r} cannot be a job's id", "use letters, digits, `.`, `_` and `-`")
        if order.task == "run" and not order.command:
            raise UserError("a run job without a command", "say what to run in `command`")
        others = [a for a in self._seen(order.job) if a.epoch != order.epoch]
        if any(a.epoch > order.epoch for a in others):
            newest = max(a.epoch for a in others)
            raise Conflict(f"epoch {order.epoch} of {order.job} is past: this node has seen epoch {newest}")
        for older in others:
            self.stop(older.job, older.epoch, "cancel")

    def _seen(self, job: str) -> list[AttemptId]:
        found = (parse(path.name) for path in self._folder.iterdir())
        return [a for a in found if a is not None and a.job == job]

    @contextmanager
    def _starting(self, attempt: AttemptId, folder: Folder, order: Order) -> Iterator[int | None]:
        """The lock the supervisor will inherit; None when there is or was a supervisor: then nothing is to be done."""
        with self._changed:
            folder.path.mkdir(mode=0o700, exist_ok=True)
            known = self._attempts.setdefault(attempt, Attempt(attempt, folder, order.lease_s))
            lock = None if known.starting or folder.supervisor.exists() else lease.hold(folder.lock)
            known.starting = lock is not None or known.starting
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
        for attempt in self._of(job, epoch):
            attempt.stop(how)
        with self._changed:
            self._changed.notify_all()

    def forget(self, job: str, epoch: int) -> None:
        for attempt in self._of(job, epoch):
            attempt.forget()
            with self._changed:
                self._attempts.pop(attempt.id, None)

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

    def renew(self) -> None:
        """Give every living attempt its full lease: the controller has just spoken to us."""
        if time.monotonic() - self._renewed_s >= RENEW_AT_MOST_EVERY_S:
            self._renewed_s = time.monotonic()
            for attempt in self.live():
                if attempt.unreadable:
                    continue  # it ends with its lease, if its supervisor does not obey
                try:
                    attempt.renew()
                except OSError as e:
                    LOG.error("attempt %s: its lease cannot be written: %s", attempt.id, e)

    def news(self, cursors: Mapping[str, int], known: Mapping[str, str], timeout_s: float) -> list[AttemptReport]:
        """Of all attempts with news, as soon as there is one; [] after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while True:
            reports, live = self._look(cursors, known)
            left = until - time.monotonic()
            if reports or left <= 0:
                return reports
            with self._changed:
                self._changed.wait(min(left, LOOK_EVERY_S) if live else left)

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
