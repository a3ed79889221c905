"""Attempts from placement to their end: carried out, steered, concluded. Only the runtime's own thread calls this."""

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, UserError
from orchestrator.core import fold, retry
from orchestrator.core.fold import Record
from orchestrator.core.model import Devices, Event, Plan
from orchestrator.core.states import State
from orchestrator.runtime import reservations
from orchestrator.runtime.endings import combine, peak_of, result_of
from orchestrator.runtime.follow import Follower
from orchestrator.runtime.jobs import Jobs, NotStored
from orchestrator.runtime.launch import Launcher
from orchestrator.runtime.live import Live, live_of, lost_outcome
from orchestrator.spec import parse_job

log = logging.getLogger(__name__)

THREADS = 8


class Placements:
    """What takes time (launching, asking agents to stop, tidying) runs in threads; a launch answers through `inbox`."""

    def __init__(
        self,
        jobs: Jobs,
        lives: dict[str, Live],
        launcher: Launcher,
        follower: Follower,
        inbox: "queue.SimpleQueue[Any]",
    ):
        self._jobs, self._lives, self._launcher, self._follower, self._inbox = jobs, lives, launcher, follower, inbox
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="placements")

    def later(self, function: Callable[..., object], *arguments: Any) -> None:
        self._threads.submit(function, *arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def apply(self, planned: Plan, devices: dict[str, Devices]) -> None:
        """Each line is checked again when it is recorded: a job that was cancelled meanwhile is not started."""
        for start in planned.start:
            have = devices[start.leases[0][0]]
            placed = fold.placed(self._jobs[start.job].job, start, have.kind, have.pool, time.time())
            if not self._jobs.record(placed):
                self._begin(start.job, devices)
        for preempt in planned.preempt:
            victim, why = self._jobs[preempt.victim].job, {"reason": preempt.reason, "by": preempt.job}
            self._jobs.record(Event(victim.id, "preempted", victim.epoch, time.time(), why))

    def _begin(self, job_id: str, devices: dict[str, Devices]) -> None:
        live = live_of(self._jobs[job_id])
        if live is not None:
            live.launching = True
            self._lives[job_id] = live
            self._threads.submit(self._launch, live, devices)

    def _launch(self, live: Live, devices: dict[str, Devices]) -> None:
        record = self._jobs[live.job]
        try:
            resumed = self._launcher.launch(record, parse_job(record.spec), live, devices)
            self._inbox.put(("launched", live, resumed))
        except PolyfleetError as e:
            self._inbox.put(("launch_failed", live, e))
        except Exception as e:
            log.exception("launching %s", live.key)
            unforeseen = FleetError(f"launching failed: {e!r}", "its traceback is in the server's log")
            self._inbox.put(("launch_failed", live, unforeseen))

    def launched(self, live: Live, resumed: dict[str, Any] | None) -> None:
        live.launching, live.seen_s = False, time.monotonic()
        if resumed:
            self._jobs.record(Event(live.job, "resumed", live.epoch, time.time(), {"step": resumed["step"]}))

    def launch_failed(self, live: Live, error: PolyfleetError) -> None:
        """Stop what may have started. What the user got wrong ends the job; trouble of the fleet does not, and is no
        interruption either.
        """
        live.launching = False
        of_the_user = isinstance(error, UserError) and not isinstance(error, NotFound | Conflict)
        state, kind = ("failed", "user") if of_the_user else ("lost", "launch")
        job = self._jobs[live.job].job
        for rank, part in enumerate(live.parts):
            part.ended = lost_outcome(job, live.epoch, rank, part.node, str(error), state, kind)
            self._threads.submit(self._follower.dismiss, part.node, live.job, live.epoch, False)

    def steer(self, live: Live) -> None:
        """Ask parts to stop where the job, or a sister part, says so; conclude the attempt once all have ended.

        Raises NotStored; what else goes wrong with one attempt stops no other.
        """
        try:
            self._steer(live)
        except NotStored:
            raise
        except Exception:
            log.exception("attempt %s", live.key)

    def _steer(self, live: Live) -> None:
        if live.launching:
            return
        state = self._jobs[live.job].job.state
        broken = any(part.spoiled or (part.ended and part.ended["state"] != "succeeded") for part in live.parts)
        wanted = "cancel" if state is State.CANCELLED or broken else "preempt" if state is State.SAVING else ""
        if wanted and live.stopping not in (wanted, "cancel"):
            live.stopping = wanted
            for node in {part.node for part in live.parts if part.ended is None}:
                self._threads.submit(self._stop, node, live, wanted)
        if live.over:
            self._conclude(live)

    def _stop(self, node: str, live: Live, how: str) -> None:
        if not self._follower.stop(node, live.job, live.epoch, how):
            live.stopping = ""  # asked again in the next turn

    def _conclude(self, live: Live) -> None:
        record = self._jobs[live.job]
        try:
            self._jobs.record(self._ending(record, live))
        except NotStored:
            raise
        except Exception as e:
            log.exception("attempt %s cannot be concluded from its outcomes", live.key)
            why = f"how it ended cannot be used: {e!r}"
            for rank, part in enumerate(live.parts):
                part.ended = lost_outcome(record.job, live.epoch, rank, part.node, why, "failed", "unreadable")
            self._jobs.record(self._ending(record, live))
        del self._lives[live.job]
        self._threads.submit(self._tidy, live)

    def _ending(self, record: Record, live: Live) -> Event:
        ended, decisive = combine(live, record.attempts[-1].candidate)
        now_s = time.time()
        if record.job.state is State.CANCELLED:
            told = {"outcome": "cancelled", "reason": record.reason}
            return Event(live.job, "released", live.epoch, now_s, told)
        decision = retry.after(record.job, ended, now_s)
        more = {"outcome": ended.state, "result": result_of(live), "failure": decisive["failure"]}
        return fold.ended(record.job, decision, now_s, **more, peak_memory_bytes=peak_of(live))

    def _tidy(self, live: Live) -> None:
        """Now that the ending is durable, the reservation goes back and the nodes may forget."""
        reservations.release(live.key)
        for node in {part.node for part in live.parts}:
            self._follower.dismiss(node, live.job, live.epoch, True)
