"""The thread that reads the histories of open jobs once after the start, and then removes jobs that ended long ago."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from cluster.errors import FleetError, UserError
from orchestrator.resources import duration_s
from orchestrator.runtime import fences
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.jobs import Jobs
from orchestrator.store.events import EventStore
from orchestrator.store.retention import Place

log = logging.getLogger(__name__)

SETTING = "POLYFLEET_KEEP_JOBS"
KEEP_JOBS = "30d"
FOREVER = "forever"
KEYS_AT_LEAST_S = 86400.0
LOOK_EVERY_S = 600.0
PAUSE_S = 0.02
"""Between two transactions: submits come first."""

PLACES_KEPT_S = 30 * 86400.0
"""How long a node that is away is waited for before its folders are left to it."""

Forget = Callable[[list[Place]], list[Place]]
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
    clock that is set ten years ahead must not remove the jobs that ended today.
    """

    def __init__(self, last_seq: int, keep_s: float):
        self._wall_s, self._start_s, self._keep_s = time.time(), time.monotonic(), keep_s
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
    """Asks each node once for all its folders, and removes the fences of their jobs. Silent nodes are asked again."""

    def forget(places: list[Place]) -> list[Place]:
        gone: list[Place] = []
        for node in dict.fromkeys(place.node for place in places):
            asked = [(place.job, place.epoch) for place in places if place.node == node]
            try:
                done = agents.call(node, "remove", agents.generation, asked)
            except (FleetError, KeyError) as e:
                log.info("node %s keeps %d folders of removed jobs for now: %s", node, len(asked), e)
                continue
            gone += [Place(node, job, epoch) for job, epoch in done]
        for job in dict.fromkeys(place.job for place in gone):
            with suppress(FleetError):  # a few bytes: they may stay
                fences.forget(job)
        return gone

    return forget


class Housekeeping(threading.Thread):
    """`forget` asks nodes to remove the folders of attempts, and returns those that are gone. `distrust` gets each open
    job whose history cannot be trusted, and why. `tidy` removes what belongs to no job any more.
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
        self._clock = Clock(store.last_seq, keep_s or 0.0)
        self._closing = threading.Event()

    def run(self) -> None:
        self._guarded(self.check)
        while not self._closing.is_set():
            if self._keep_s is not None:
                self._guarded(self.prune)
            self._guarded(self._tidy)
            self._closing.wait(LOOK_EVERY_S)

    def close(self) -> None:
        self._closing.set()

    def check(self) -> None:
        known = set(self._jobs.damaged)
        self._jobs.check_histories(self._pause)
        for job, why in list(self._jobs.damaged.items()):
            if job not in known:
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
        if places := kept.places():
            kept.removed(self._forget(places))
            kept.give_up(now_s - PLACES_KEPT_S)

    def _pause(self) -> bool:
        """Whether the thread is to end."""
        return self._closing.wait(PAUSE_S)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except FleetError as e:
            log.warning("removing old jobs: %s", e)
        except Exception:
            log.exception("removing old jobs; the next look is in %.0f s", LOOK_EVERY_S)
