"""The controller's one thread: observe, plan, apply; woken by every report, submission and cancellation."""

import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster import connect, fleet_record
from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, UserError
from cluster.fleet_record import FleetRecord
from orchestrator.core import fold, retry
from orchestrator.core.model import Devices, Event, Plan, Snapshot, Start
from orchestrator.core.plan import plan
from orchestrator.core.states import State
from orchestrator.runtime import observe, reservations
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.endings import combine, result_of
from orchestrator.runtime.follow import Follower
from orchestrator.runtime.jobs import Jobs
from orchestrator.runtime.launch import Launcher
from orchestrator.runtime.live import Live, live_of, lost_outcome
from orchestrator.spec import parse_job
from orchestrator.store import EventStore

log = logging.getLogger(__name__)

TURN_S = 0.5
REFRESH_S = 1.0
WATCH_S = 2.0
LAUNCHES_AT_ONCE = 8


def told_until(store: EventStore, live: Live) -> float:
    """Time of the newest report or checkpoint of this attempt in the store."""
    reported: list[float] = [r["time"] for r in store.reports(live.job) if r["epoch"] == live.epoch]
    saved = [e.time_s for e in store.events_of(live.job) if (e.event, e.epoch) == ("checkpoint", live.epoch)]
    return max([0.0, *reported[-1:], *saved[-1:]])


class Runtime(threading.Thread):
    """`trouble` is "" or why no fleet is served now. `planned` is the newest plan, for `explain` and `jobs`."""

    def __init__(
        self, jobs: Jobs, store: EventStore, agents: Agents, launcher: Launcher, inbox: "queue.SimpleQueue[Any]"
    ):
        super().__init__(name="runtime", daemon=True)
        self.jobs, self.agents, self.launcher, self.inbox = jobs, agents, launcher, inbox
        self.trouble, self.planned = "no fleet is up", Plan()
        self.lives: dict[str, Live] = {r.job.id: live for r in jobs.all() if (live := live_of(r))}
        for live in self.lives.values():
            live.told_s = told_until(store, live)
        self.follower = Follower(jobs, store, agents, self.lives)
        self._fleet: FleetRecord | None = None
        self._refreshed_s = 0.0
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(LAUNCHES_AT_ONCE, thread_name_prefix="launch")

    def wake(self) -> None:
        self.inbox.put(None)

    def close(self) -> None:
        self._closing.set()
        self.wake()
        self.join(timeout=10)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._fleet:
            connect.disconnect()

    def run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn(self._drain())
            except PolyfleetError as e:
                self.trouble = str(e)
                log.warning("%s", e)
            except Exception:
                log.exception("this turn failed; the next one starts from what is stored")
                self._closing.wait(TURN_S)

    def _drain(self) -> list[Any]:
        messages = []
        try:
            messages.append(self.inbox.get(timeout=TURN_S))
            while True:
                messages.append(self.inbox.get_nowait())
        except queue.Empty:
            return [m for m in messages if m is not None]

    def _turn(self, messages: list[Any]) -> None:
        if not self._joined():
            return
        for kind, *rest in messages:
            getattr(self, f"_on_{kind}")(*rest)
        self._refresh()
        self.follower.judge_lost()
        for live in list(self.lives.values()):
            self._steer(live)
        self._apply(self.snapshot())
        self._watch()

    # -- observe

    def _joined(self) -> bool:
        """Whether we are in the recorded fleet's Ray cluster; joins it when it is new."""
        fleet = fleet_record.read()
        if fleet is None or fleet.state != "up":
            self.trouble = "no fleet is up" if fleet is None else f"the fleet is {fleet.state}"
            return False
        if self._fleet is None or self._fleet.address != fleet.address:
            if self._fleet is not None:
                connect.disconnect()
                self.agents.clear()
            connect.prepare(fleet)
            connect.connect(fleet)
            self._drop_stale_reservations()
        self._fleet, self.trouble = fleet, ""
        return True

    def _drop_stale_reservations(self) -> None:
        for attempt in set(reservations.held()) - {live.key for live in self.lives.values()}:
            reservations.release(attempt)

    def _refresh(self) -> None:
        if time.monotonic() - self._refreshed_s > REFRESH_S:
            self.agents.refresh()
            self._refreshed_s = time.monotonic()

    def _watch(self) -> None:
        for node, _ in self.agents.items():
            parts = [
                (live.part_key(i), p)
                for live in self.lives.values()
                for i, p in enumerate(live.parts)
                if p.node == node
            ]
            cursors = {key: part.cursor for key, part in parts}
            known = {key: "ended" if part.ended else part.phase for key, part in parts}
            self.agents.watch(node, cursors, known, WATCH_S)

    def snapshot(self) -> Snapshot:
        pools = self._fleet.pools if self._fleet else {}
        prices = {name: float(pool.get("price_per_hour", 0.0)) for name, pool in pools.items()}
        return observe.snapshot(time.time(), self.agents.items(), prices, self.jobs.all(), self.jobs.waiting())

    # -- messages

    def _on_watched(self, node: str, answer: Any) -> None:
        if isinstance(answer, BaseException):
            self.agents.failed(node, answer)
        else:
            self.follower.heard(node, answer)

    def _on_launched(self, live: Live, resumed: dict[str, Any] | None) -> None:
        live.launching, live.seen_s = False, time.monotonic()
        if resumed:
            self.jobs.record(Event(live.job, "resumed", live.epoch, time.time(), {"step": resumed["step"]}))

    def _on_launch_failed(self, live: Live, error: PolyfleetError) -> None:
        """Stop what may have started. A user's error (a secret that is not there) ends the job, trouble of the fleet
        does not.
        """
        live.launching = False
        of_the_user = isinstance(error, UserError) and not isinstance(error, NotFound | Conflict)
        state = "failed" if of_the_user else "lost"
        for rank, part in enumerate(live.parts):
            job = self.jobs[live.job].job
            part.ended = lost_outcome(job, live.epoch, rank, part.node, str(error)) | {"state": state}
            part.ended["failure"]["kind"] = "internal" if state == "lost" else "user"
            self.follower.dismiss(part.node, live.job, live.epoch, ended=False)

    # -- apply

    def _steer(self, live: Live) -> None:
        """Ask parts to stop where the job, or a sister part, says so; conclude the attempt when all its parts have
        ended.
        """
        if live.launching:
            return
        state = self.jobs[live.job].job.state
        broken = any(p.ended and p.ended["state"] != "succeeded" for p in live.parts)
        wanted = "cancel" if state is State.CANCELLED or broken else "preempt" if state is State.SAVING else ""
        if wanted and live.stopping not in (wanted, "cancel"):
            live.stopping = wanted
            for part in live.parts:
                if part.ended is None:
                    self._threads.submit(self._ask_to_stop, part.node, live, wanted)
        if live.over:
            self._conclude(live)

    def _ask_to_stop(self, node: str, live: Live, how: str) -> None:
        try:
            self.agents.call(node, "stop", live.job, live.epoch, how)
        except FleetError as e:
            log.warning("asking %s to %s %s: %s", node, how, live.key, e)
            live.stopping = ""

    def _conclude(self, live: Live) -> None:
        record = self.jobs[live.job]
        attempt = record.attempts[-1]
        ended, decisive = combine(live, attempt.candidate)
        now_s = time.time()
        if record.job.state is State.CANCELLED:
            event = Event(live.job, "released", live.epoch, now_s, {"outcome": "cancelled", "reason": record.reason})
        else:
            decision = retry.after(record.job, ended, now_s)
            event = fold.ended(
                record.job, decision, now_s, outcome=ended.state, result=result_of(live), failure=decisive["failure"]
            )
        self.jobs.record(event)
        del self.lives[live.job]
        self._threads.submit(self._tidy, live)

    def _tidy(self, live: Live) -> None:
        """After the ending is durable: the reservation goes back, the nodes may forget. What fails here is done by the
        next start.
        """
        reservations.release(live.key)
        for node in {part.node for part in live.parts}:
            agent = self.agents.get(node)
            if agent and agent.ready:
                self.follower.dismiss(node, live.job, live.epoch, ended=True)

    def _apply(self, seen: Snapshot) -> None:
        self.planned = plan(seen)
        devices = {d.id: d for d in seen.devices}
        for start in self.planned.start:
            self._start(start, devices)
        for preempt in self.planned.preempt:
            victim = self.jobs[preempt.victim].job
            self.jobs.record(
                Event(victim.id, "preempted", victim.epoch, time.time(), {"reason": preempt.reason, "by": preempt.job})
            )

    def _start(self, start: Start, devices: dict[str, Devices]) -> None:
        have = devices[start.leases[0][0]]
        placed = fold.placed(self.jobs[start.job].job, start, have.kind, have.pool, time.time())
        if self.jobs.record(placed):
            return  # cancelled in between
        record = self.jobs[start.job]
        live = live_of(record)
        if live is None:
            return
        live.launching = True
        self.lives[live.job] = live
        self._threads.submit(self._launch, live, devices)

    def _launch(self, live: Live, devices: dict[str, Devices]) -> None:
        record = self.jobs[live.job]
        try:
            resumed = self.launcher.launch(record, parse_job(record.spec), live, devices)
            self.inbox.put(("launched", live, resumed))
        except PolyfleetError as e:
            self.inbox.put(("launch_failed", live, e))
        except Exception as e:
            log.exception("launching %s", live.key)
            self.inbox.put(
                ("launch_failed", live, FleetError(f"launching failed: {e!r}", "its traceback is in the server's log"))
            )
