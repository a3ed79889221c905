"""The thread that reads the histories of open jobs after the start, removes jobs that ended long ago, and brings the
rows of other ended jobs up to date after a change of Polyfleet's version.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from cluster.errors import FleetError, PolyfleetError, UserError
from orchestrator.resource_syntax import duration_s
from orchestrator.runtime import fences
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.jobs import Jobs
from orchestrator.store.event_store import EventStore
from orchestrator.store.retention import AttemptFolderRef

log = logging.getLogger(__name__)

SETTING = "POLYFLEET_KEEP_JOBS"
KEEP_JOBS = "30d"
FOREVER = "forever"
KEYS_AT_LEAST_S = 86400.0
LOOK_EVERY_S = 600.0
CHECKED_AGAIN_S = 5.0
"""After a store that could not be read."""
PAUSE_S = 0.02
"""Between two transactions: submits come first."""

PLACES_KEPT_S = 30 * 86400.0
"""How long a node that is away is waited for before its folders are left to it."""

Forget = Callable[[list[AttemptFolderRef]], list[AttemptFolderRef]]
Distrust = Callable[[str, str], None]


def keep_jobs_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """How long an ended job is kept, None for ever. Raises UserError for what is not a duration."""
    wanted = environment.get(SETTING, "").strip() or KEEP_JOBS
    if wanted.lower() == FOREVER:
        return None
    try:
        return duration_s(wanted)
    except UserError as e:
        raise UserError(f"{SETTING}: {e.message}", f"write e.g. {SETTING}=30d, or {SETTING}={FOREVER}") from None


class Clock:
    """Wall time that no correction of the machine's clock moves while the server runs, and which events are old: a
    clock that is set ten years ahead must not remove the jobs that ended today. At the start it is no later than the
    newest event (`newest_s`, None: there is none): the clock may have been set ahead before.
    """

    def __init__(self, last_seq: int, newest_s: float | None, keep_s: float):
        wall_s = time.time()
        self._wall_s = wall_s if newest_s is None else min(wall_s, newest_s)
        self._start_s, self._keep_s = time.monotonic(), keep_s
        self._first_seq = last_seq
        self._marks: deque[tuple[float, int]] = deque()

    def now_s(self) -> float:
        return self._wall_s + time.monotonic() - self._start_s

    def old_up_to(self, last_seq: int) -> int:
        """The newest event that may be of a job that ended `keep_s` ago: from before the start, or seen so long ago."""
        now_s = time.monotonic()
        self._marks.append((now_s, last_seq))
        while self._marks and now_s - self._marks[0][0] >= self._keep_s:
            self._first_seq = self._marks.popleft()[1]
        return self._first_seq


def forget_on(agents: Agents) -> Forget:
    """Asks their node, and removes the fences of the jobs whose folders are gone there."""

    def forget(places: list[AttemptFolderRef]) -> list[AttemptFolderRef]:
        node = places[0].node
        done = agents.call(node, "remove", agents.generation, [(place.job, place.epoch) for place in places])
        gone = [AttemptFolderRef(node, job, epoch) for job, epoch in done]
        for job in dict.fromkeys(place.job for place in gone):
            with suppress(FleetError):  # a few bytes: they may stay
                fences.forget(job)
        return gone

    return forget


class Housekeeping(threading.Thread):
    """`forget` asks a node to remove the folders of attempts there, and returns those that are gone; it raises
    PolyfleetError where the node does not answer. `distrust` gets each open job whose history cannot be trusted, and
    why. `tidy` removes what belongs to no job any more.
    """

    def __init__(
        self,
        jobs: Jobs,
        store: EventStore,
        forget: Forget,
        keep_s: float | None,
        distrust: Distrust = lambda job, why: None,
        tidy: Callable[[], None] = lambda: None,
    ):
        super().__init__(name="housekeeping", daemon=True)
        self._jobs, self._store, self._forget, self._keep_s = jobs, store, forget, keep_s
        self._distrust, self._tidy = distrust, tidy
        self._distrusted = set(jobs.damaged)
        self._clock = Clock(store.last_seq, store.newest_s(), keep_s or 0.0)
        self._closing = threading.Event()
        self._refreshed: int | None = 0

    def run(self) -> None:
        checked = False
        while not self._closing.is_set():
            checked = checked or self._guarded("reading the histories of open jobs", self.check)
            if self._keep_s is not None:
                self._guarded("removing old jobs", self.prune)
            self._guarded("bringing rows of ended jobs up to date", self.refresh)
            self._guarded("removing packages that no job names", self._tidy)
            self._closing.wait(LOOK_EVERY_S if checked else CHECKED_AGAIN_S)

    def close(self) -> None:
        self._closing.set()

    def check(self) -> None:
        try:
            self._jobs.check_histories(self._pause)
        finally:
            for job, why in list(self._jobs.damaged.items()):
                if job not in self._distrusted:
                    self._distrusted.add(job)
                    self._distrust(job, why)

    def prune(self) -> None:
        """Remove all that is too old now. Ends early when the thread is closed."""
        keep_s, kept = self._keep_s or 0.0, self._store.retention
        now_s, up_to = self._clock.now_s(), self._clock.old_up_to(self._store.last_seq)
        count = removed = kept.remove_jobs(now_s - keep_s, up_to)
        while removed and not self._pause():
            count += (removed := kept.remove_jobs(now_s - keep_s, up_to))
        while kept.remove_rows() and not self._pause():
            pass
        while kept.remove_keys(now_s - max(keep_s, KEYS_AT_LEAST_S)) and not self._pause():
            pass
        if count:
            log.info("%d jobs that ended more than %.1f days ago were removed", count, keep_s / 86400)
        for node in kept.nodes():
            if not self._clear(node):
                kept.give_up(node, now_s - PLACES_KEPT_S)

    def _clear(self, node: str) -> bool:
        """Have all folders of removed jobs there removed, some at a time. Whether the node answered at all."""
        kept, last = self._store.retention, None
        while not self._closing.is_set() and (places := kept.places(node, last)):
            try:
                gone = self._forget(places)
            except PolyfleetError as e:
                log.info("node %s keeps folders of removed jobs for now: %s", node, e)
                return last is not None
            kept.removed(gone)
            last = places[-1]
            self._pause()
        return True

    def refresh(self) -> None:
        """Bring rows that another version wrote up to date, once: this server writes none. A later call goes on where
        an error stopped the one before.
        """
        while self._refreshed is not None and not self._closing.is_set():
            self._refreshed = self._store.refresh(self._refreshed)
            self._pause()

    def _pause(self) -> bool:
        """Whether the thread is to end."""
        return self._closing.wait(PAUSE_S)

    def _guarded(self, name: str, work: Callable[[], object]) -> bool:
        """Whether it was done."""
        try:
            work()
        except FleetError as e:
            log.warning("%s: %s; it is tried again", name, e)
            return False
        except Exception:
            log.exception("%s failed; it is tried again", name)
            return False
        return True
