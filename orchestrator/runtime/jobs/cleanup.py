"""Housekeeping thread: check histories of open jobs at the start, remove old jobs, update old rows.

Rows of ended jobs that another version of Polyfleet wrote are updated once.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from cluster.errors import FleetError, PolyfleetError, UserError
from orchestrator.runtime.agents import fences
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.spec.resource_syntax import duration_s
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.retention import AttemptFolderRef

log = logging.getLogger(__name__)

SETTING = "POLYFLEET_KEEP_JOBS"
KEEP_JOBS = "30d"
FOREVER = "forever"
MIN_KEY_AGE_S = 86400.0
INTERVAL_S = 600.0
CHECK_RETRY_S = 5.0
"""Seconds until the next check if the store could not be read."""
PAUSE_S = 0.02
"""Pause between two transactions, so that submissions come first."""

MAX_FOLDER_WAIT_S = 30 * 86400.0
"""Seconds after which folders of removed jobs on a node that does not come back are no longer tracked."""

RemoveFolders = Callable[[list[AttemptFolderRef]], list[AttemptFolderRef]]
DamageCallback = Callable[[str, str], None]


def keep_jobs_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds for which an ended job is retained (None: for ever).

    Raises UserError if the setting is not a duration.
    """
    text = environment.get(SETTING, "").strip() or KEEP_JOBS
    if text.lower() == FOREVER:
        return None
    try:
        return duration_s(text)
    except UserError as e:
        raise UserError(f"{SETTING}: {e.message}", f"write e.g. {SETTING}=30d, or {SETTING}={FOREVER}") from None


class Clock:
    """Wall time that ignores changes of the machine's clock while the server runs, and the age of events.

    A clock set ten years ahead must not remove jobs that ended today. At the start, the time is at most that of the
    newest event (`newest_s`; None: there is none), because the clock may have been set ahead before.
    """

    def __init__(self, last_seq: int, newest_s: float | None, keep_s: float):
        wall_s = time.time()
        self._wall_s = wall_s if newest_s is None else min(wall_s, newest_s)
        self._start_s, self._keep_s = time.monotonic(), keep_s
        self._first_seq = last_seq
        self._marks: deque[tuple[float, int]] = deque()

    def now_s(self) -> float:
        return self._wall_s + time.monotonic() - self._start_s

    def newest_old_event(self, last_seq: int) -> int:
        """Number of the newest event that is old enough: from before the start, or first read `keep_s` ago."""
        now_s = time.monotonic()
        self._marks.append((now_s, last_seq))
        while self._marks and now_s - self._marks[0][0] >= self._keep_s:
            self._first_seq = self._marks.popleft()[1]
        return self._first_seq


def folder_remover(agents: Agents) -> RemoveFolders:
    """Make a function that calls the node to remove folders, then removes the fences of those jobs.

    If the node does not respond, others remove what it uploaded to an object store, since it may never come back.
    """
    requested = set[AttemptFolderRef]()

    def remove_folders(folders: list[AttemptFolderRef]) -> list[AttemptFolderRef]:
        node = folders[0].node
        try:
            pairs = agents.call(
                node, "remove_all_files", agents.generation, [(folder.job, folder.epoch) for folder in folders]
            )
        except FleetError:
            due = [folder for folder in folders if folder not in requested]
            if due and _remove_from_stores(agents, due):
                requested.update(due)
            raise
        removed = [AttemptFolderRef(node, job, epoch) for job, epoch in pairs]
        for job in dict.fromkeys(folder.job for folder in removed):
            with suppress(FleetError):  # a fence that stays is a few bytes
                fences.remove(job)
        return removed

    return remove_folders


def _remove_from_stores(agents: Agents, folders: list[AttemptFolderRef]) -> bool:
    """Have one node of each pool with an object store remove the files of jobs there. Return whether one did."""
    nodes = {other.facts.pool: name for name, other in agents.ready() if other.facts and other.facts.object_store}
    epochs = {folder.job: folder.epoch for folder in sorted(folders, key=lambda folder: folder.epoch)}
    removed = False
    for name in nodes.values():
        with suppress(FleetError):
            for job, epoch in epochs.items():
                agents.call(name, "remove_stored_files", job, epoch)
            removed = True
    return removed


class Housekeeping(threading.Thread):
    """The housekeeping thread; it starts with `start`.

    `remove_folders` makes a node remove attempt folders and returns the removed ones; raises PolyfleetError if the node
    does not respond. `on_damaged_job` gets each open job with a damaged history, and the reason. `remove_unused_data`
    removes what no job uses any more.
    """

    def __init__(
        self,
        jobs: Jobs,
        store: EventStore,
        remove_folders: RemoveFolders,
        keep_s: float | None,
        on_damaged_job: DamageCallback = lambda job, why: None,
        remove_unused_data: Callable[[], None] = lambda: None,
    ):
        super().__init__(name="housekeeping", daemon=True)
        self._jobs, self._store, self._remove_folders, self._keep_s = jobs, store, remove_folders, keep_s
        self._on_damaged_job, self._remove_unused_data = on_damaged_job, remove_unused_data
        self._damaged_jobs = set(jobs.damaged)
        self._clock = Clock(store.last_seq, store.newest_s(), keep_s or 0.0)
        self._closing = threading.Event()
        self._refreshed: int | None = 0

    def run(self) -> None:
        checked = False
        while not self._closing.is_set():
            checked = checked or self._run_safely("reading the histories of open jobs", self.check_histories)
            if self._keep_s is not None:
                self._run_safely("removing old jobs", self.prune)
            self._run_safely("updating rows of ended jobs", self.refresh)
            self._run_safely("removing unused code archives, data and files", self._remove_unused_data)
            self._closing.wait(INTERVAL_S if checked else CHECK_RETRY_S)

    def close(self) -> None:
        self._closing.set()

    def check_histories(self) -> None:
        try:
            self._jobs.check_histories(self._wait_or_closing)
        finally:
            for job, reason in list(self._jobs.damaged.items()):
                if job not in self._damaged_jobs:
                    self._damaged_jobs.add(job)
                    self._on_damaged_job(job, reason)

    def prune(self) -> None:
        """Remove all jobs, rows and keys that are too old now. Ends early when the thread is closed."""
        keep_s, retention = self._keep_s or 0.0, self._store.retention
        now_s, up_to = self._clock.now_s(), self._clock.newest_old_event(self._store.last_seq)
        count = removed = retention.remove_jobs(now_s - keep_s, up_to)
        while removed and not self._wait_or_closing():
            count += (removed := retention.remove_jobs(now_s - keep_s, up_to))
        while retention.remove_rows() and not self._wait_or_closing():
            pass
        while retention.remove_keys(now_s - max(keep_s, MIN_KEY_AGE_S)) and not self._wait_or_closing():
            pass
        if count:
            log.info("%d jobs that ended more than %.1f days ago were removed", count, keep_s / 86400)
        for node in retention.nodes():
            if not self._clear_node(node):
                retention.give_up(node, now_s - MAX_FOLDER_WAIT_S)

    def _clear_node(self, node: str) -> bool:
        """Have a node remove all folders of removed jobs, in batches.

        Return False if it did not respond at all.
        """
        retention, newest = self._store.retention, None
        while not self._closing.is_set() and (folders := retention.folders(node, newest)):
            try:
                removed = self._remove_folders(folders)
            except PolyfleetError as e:
                log.info(
                    "node %s did not remove the folders of removed jobs; the server tries again later: %s", node, e
                )
                return newest is not None
            retention.folders_removed(removed)
            newest = folders[-1]
            self._wait_or_closing()
        return True

    def refresh(self) -> None:
        """Update rows that another version wrote; needed once, as this server writes no such rows.

        After an error, the next call continues where this one stopped.
        """
        while self._refreshed is not None and not self._closing.is_set():
            self._refreshed = self._store.refresh(self._refreshed)
            self._wait_or_closing()

    def _wait_or_closing(self) -> bool:
        """Wait a moment; return True if the thread must end."""
        return self._closing.wait(PAUSE_S)

    def _run_safely(self, name: str, work: Callable[[], object]) -> bool:
        """Call `work`, and log any error. Return whether it succeeded."""
        try:
            work()
        except FleetError as e:
            log.warning("%s: %s; it will be retried", name, e)
            return False
        except Exception:
            log.exception("%s failed; it will be retried", name)
            return False
        return True
