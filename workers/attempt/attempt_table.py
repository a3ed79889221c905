"""The attempts of one node as its folder shows them: known, looked at, told, their leases renewed."""

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
from workers.attempt import lease, wakeup_pipe
from workers.attempt.attempt import LocalAttempt
from workers.attempt.folders import AttemptFolder, AttemptId, parse, read_json
from workers.messages import AttemptStatus
from workers.rank_events import LONGEST_LINE_BYTES

LOOK_EVERY_S = 0.02
RENEW_AT_MOST_EVERY_S = 0.5
MOST_EPOCHS = 100_000
"""Of jobs, told to a new controller: some megabytes."""
MOST_LINES, LEAST_LINES = 2000, 50
MOST_BYTES = 1 << 20
"""Of events, read in one look at all attempts of the node."""
SHORTEST_LEASE_S = 5.0
"""Lease of an attempt whose order cannot be read: no job has a shorter one (MIN_LEASE_S), so none is exceeded."""
LOG = logging.getLogger(__name__)


def _adopted(attempt: AttemptId, folder: AttemptFolder) -> LocalAttempt | None:
    """An attempt that an earlier agent started. None where that agent was killed before it wrote the order: nothing has
    started then. An attempt whose order cannot be read may still run on its devices. It saves and stops, and its job
    continues in a new attempt: the agent cannot look after it without the order.
    """
    order: Any = read_json(folder.order)
    try:
        return LocalAttempt(attempt, folder, float(order["lease_s"]))
    except (TypeError, KeyError, ValueError):
        if not folder.order.exists():
            return None
    broken = LocalAttempt(attempt, folder, SHORTEST_LEASE_S)
    if broken.live:
        LOG.error("attempt %s: its order cannot be read; it is asked to save and stop", attempt)
        with suppress(OSError):  # a full disk: it runs on until the next agent
            broken.stop("preempt")
    return broken


class AttemptTable:
    """Nothing is kept here that a restart would lose. Safe to use from several threads."""

    def __init__(self, folder: Path, node: str):
        self._folder, self._node = private_dir(folder), node
        self._changed = threading.Condition(threading.RLock())
        self._epochs: dict[str, int] = {}
        self._ids: dict[str, set[AttemptId]] = {}  # whose folders are here, by job
        names = sorted(entry.name for entry in os.scandir(folder))
        self._attempts = {a.id: a for a in self._on_disk(names)}
        self._renewed_s = 0.0
        self._wakes = self._rings = 0
        wakeup_pipe.watch(folder, self, AttemptTable._look_now)

    def _on_disk(self, names: list[str]) -> Iterator[LocalAttempt]:
        """What an agent before us left: running attempts are adopted by knowing them."""
        for name in names:
            folder, attempt = AttemptFolder(self._folder / name), parse(name)
            if attempt is None:
                continue
            self._saw(attempt.job, attempt.epoch)
            self._ids.setdefault(attempt.job, set()).add(attempt)
            if folder.forgotten.exists():
                continue
            if found := _adopted(attempt, folder):
                yield found

    def _saw(self, job: str, epoch: int) -> None:
        """The newest jobs come last."""
        self._epochs[job] = max(epoch, self._epochs.pop(job, 0))

    def _ids_of(self, job: str, epoch: int) -> list[AttemptId]:
        """By node rank; also of attempts that are forgotten."""
        with self._changed:
            return sorted(one for one in self._ids.get(job, ()) if one.epoch == epoch)

    def _dropped(self, attempt: AttemptId) -> None:
        """Its folder is gone."""
        with self._changed:
            ids = self._ids.get(attempt.job, set())
            ids.discard(attempt)
            if not ids:
                self._ids.pop(attempt.job, None)

    def epochs(self) -> dict[str, int]:
        """The highest epoch that this node has seen of each job, of the newest MOST_EPOCHS of them."""
        with self._changed:
            return dict(islice(reversed(self._epochs.items()), MOST_EPOCHS))

    def log(self, job: str, epoch: int, rank: int, offset: int, limit_bytes: int) -> dict[str, Any]:
        """Also of attempts that are forgotten. Raises NotFound for one this node never had."""
        return self._logged(job, epoch, rank).log(rank, offset, limit_bytes)

    def log_tail(self, job: str, epoch: int, rank: int, count: int) -> dict[str, int]:
        return self._logged(job, epoch, rank).log_tail(rank, count)

    def _logged(self, job: str, epoch: int, rank: int) -> LocalAttempt:
        """That of the node ranks whose log it is; the others, if there are any, have none."""
        ids = self._ids_of(job, epoch)
        if not ids:
            raise NotFound(f"this node never ran attempt {epoch} of {job}", "`show` says on which node it ran")
        folders = [(a, AttemptFolder(self._folder / str(a))) for a in ids]
        attempt, folder = next(((a, f) for a, f in folders if f.log(rank).exists()), folders[0])
        return LocalAttempt(attempt, folder, 0.0)

    def folder(self, job: str, epoch: int) -> Path:
        """Where the ranks of the first attempt here write. Raises NotFound."""
        attempts = self._of(job, epoch)
        if not attempts:
            raise NotFound(f"attempt {epoch} of {job} does not run on node {self._node}", "`show` says where it runs")
        return attempts[0].folder.shared

    def running(self, job: str, epoch: int, rank: int) -> AttemptFolder:
        """Of the attempt whose ranks, that one among them, run here. Raises Conflict, NotFound."""
        for attempt in self._of(job, epoch):
            order: Any = read_json(attempt.folder.order)
            if order is None or not order["first_rank"] <= rank < order["first_rank"] + order["ranks"]:
                continue
            if (phase := attempt.phase) != "running":
                raise Conflict(f"attempt {epoch} of {job} is {phase} on node {self._node}", "`show` tells its state")
            return attempt.folder
        raise NotFound(f"rank {rank} of {job} does not run on node {self._node}", "`show` says where it runs")

    def _of(self, job: str, epoch: int) -> list[LocalAttempt]:
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

    def live(self) -> list[LocalAttempt]:
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

    def news(
        self, cursors: Mapping[str, int], known: Mapping[str, str], timeout_s: float, gather_s: float = 0.0
    ) -> list[AttemptStatus]:
        """Of all attempts with news, as soon as one is in another phase than `known`, or `gather_s` have passed and
        there are events; [] after `timeout_s`, or once `wake` was called.
        """
        asked_s, wakes = time.monotonic(), self._wakes
        while True:
            rings = self._rings
            reports, live = self._look(cursors, known)
            passed_s = time.monotonic() - asked_s
            moved = any(report.phase != known.get(report.key) for report in reports)
            if moved or passed_s >= timeout_s or self._wakes != wakes or (reports and passed_s >= gather_s):
                return reports
            left_s = (min(gather_s, timeout_s) if reports else timeout_s) - passed_s
            with self._changed:
                if self._rings == rings:  # what rang amid the look may not be in it
                    self._changed.wait(min(left_s, LOOK_EVERY_S) if live and not reports else left_s)

    def _look_now(self) -> None:
        with self._changed:
            self._rings += 1
            self._changed.notify_all()

    def wake(self) -> None:
        """There is news of the node itself: whoever waits for news is answered."""
        with self._changed:
            self._wakes += 1
            self._look_now()

    def _look(self, cursors: Mapping[str, int], known: Mapping[str, str]) -> tuple[list[AttemptStatus], bool]:
        """News, and whether there may be some without anybody's asking. Each attempt gets the same share of a look."""
        with self._changed:
            attempts = list(self._attempts.values())
        share = max(1, len(attempts))
        found = [self._ask(a, cursors.get(str(a.id), 0), known.get(str(a.id), ""), share) for a in attempts]
        return [report for report in found if report is not None], any(a.live or a.draining for a in attempts)

    def _ask(self, attempt: LocalAttempt, cursor: int, known: str, share: int) -> AttemptStatus | None:
        """What goes wrong with one attempt stops no other."""
        lines, size = max(LEAST_LINES, MOST_LINES // share), max(2 * LONGEST_LINE_BYTES, MOST_BYTES // share)
        try:
            attempt.settle()
            if attempt.gone:
                with self._changed:
                    self._attempts.pop(attempt.id, None)
                    self._dropped(attempt.id)
                return None
            return attempt.report(cursor, known, lines, size)
        except OSError as e:  # of the node: no space, no descriptors
            attempt.trouble(str(e))
        except Exception as e:
            LOG.exception("attempt %s", attempt.id)
            attempt.spoil(f"what its ranks wrote cannot be followed: {e!r}")
        return None
