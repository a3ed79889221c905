"""The controller's one thread: observe, plan, apply; woken by every report, submission and cancellation.

It waits for nothing but its inbox and the store: what Ray and the agents are asked runs in other threads.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cluster import fleet_record
from cluster.errors import PolyfleetError
from cluster.fleet_record import FleetRecord
from cluster.paths import home
from orchestrator.core.model import Devices, Event, Plan, Snapshot
from orchestrator.core.plan import plan
from orchestrator.core.states import TERMINAL
from orchestrator.core.throughput import Throughput
from orchestrator.runtime import observe, reservations
from orchestrator.runtime.agents import HEAD_LATE_S, Agents
from orchestrator.runtime.follow import Follower
from orchestrator.runtime.jobs import Jobs, NotStored
from orchestrator.runtime.launch import Launcher
from orchestrator.runtime.leaks import Leaks
from orchestrator.runtime.link import NO_FLEET, Link
from orchestrator.runtime.live import Live, live_of
from orchestrator.runtime.placements import Placements
from orchestrator.runtime.pulse import Pulse
from orchestrator.store import EventStore, origin

log = logging.getLogger(__name__)

TURN_S = 0.5
WATCH_S = 2.0


def told_until(store: EventStore, live: Live) -> float:
    """Time of the newest report or checkpoint of this attempt in the store."""
    reported: list[float] = [r["time"] for r in store.reports(live.job) if r["epoch"] == live.epoch]
    saved = [e.time_s for e in store.events_of(live.job) if (e.event, e.epoch) == ("checkpoint", live.epoch)]
    return max([0.0, *reported[-1:], *saved[-1:]])


class Runtime(threading.Thread):
    """`trouble` is "" or why no fleet is served now, `holding` why nothing is placed. `planned` is the newest plan, for
    `explain` and `jobs`. `replaced`: the fleet began with another database. `seen` is told the devices of each turn.
    """

    def __init__(
        self,
        jobs: Jobs,
        store: EventStore,
        agents: Agents,
        launcher: Launcher,
        inbox: "queue.SimpleQueue[Any]",
        throughput: Callable[[], Throughput] = Throughput,
        pulse: Pulse | None = None,
        seen: Callable[[tuple[Devices, ...]], None] = lambda _: None,
    ):
        super().__init__(name="runtime", daemon=True)
        self._jobs, self._store, self._agents, self._inbox = jobs, store, agents, inbox
        self.replaced = False
        self.seen = seen
        self._throughput = throughput
        self.pulse = pulse or Pulse()
        self.trouble, self.planned = NO_FLEET, Plan()
        self._trouble_since_s = time.monotonic()
        self._lives: dict[str, Live] = {r.job.id: live for r in jobs.all() if (live := live_of(r))}
        for live in self._lives.values():
            live.told_s = told_until(store, live)
        self._placements: Placements
        self._follower = Follower(jobs, store, agents, self._lives, lambda *asked: self._placements.later(*asked))
        self._placements = Placements(jobs, self._lives, launcher, self._follower, inbox)
        self._link = Link(agents, inbox.put)
        self.leaks = Leaks(jobs, agents, self._lives, inbox.put)
        self._handlers: dict[str, Callable[..., None]] = {
            "watched": self._watched,
            "nodes": agents.nodes_seen,
            "made": agents.made,
            "joined": self._joined,
            "left": self._link.left,
            "parted": self._link.parted,
            "held": self.leaks.held,
            "launched": self._placements.launched,
            "launch_failed": self._placements.launch_failed,
        }
        self._closing = threading.Event()

    @property
    def trouble_s(self) -> float:
        """For how long there has been trouble."""
        return time.monotonic() - self._trouble_since_s if self.trouble else 0.0

    @property
    def holding(self) -> str:
        silent_s = self._agents.head_silent_s
        return f"Ray's head has not answered for {silent_s:.0f} s" if silent_s > HEAD_LATE_S else ""

    @property
    def fleet(self) -> FleetRecord | None:
        """The record of the cluster we are in."""
        return self._link.fleet

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        self._closing.set()
        self.wake()
        self.join(timeout=10)
        self._placements.close()
        self._link.close()

    def run(self) -> None:
        while not self._closing.is_set():
            messages = self._drain()
            try:
                self._turn(messages)
                self.pulse.ended()
            except PolyfleetError as e:
                self._troubled(str(e))
                self._failed(str(e))
            except Exception as e:
                log.exception("this turn failed; the next one starts from what is stored")
                self._failed(repr(e))

    def _failed(self, error: str) -> None:
        if error != self.pulse.failing:
            log.warning("%s", error)
        self.pulse.ended(error)
        self._closing.wait(TURN_S)

    def _troubled(self, why: str) -> None:
        if why and not self.trouble:
            self._trouble_since_s = time.monotonic()
        self.trouble = why

    def _drain(self) -> list[Any]:
        messages = []
        self.pulse.doing = "waiting for messages"
        try:
            messages.append(self._inbox.get(timeout=TURN_S))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return [m for m in messages if m is not None]

    def _turn(self, messages: list[Any]) -> None:
        self.pulse.doing = "handling what agents told"
        self._handle(messages)
        self._cancel_damaged()
        self.pulse.doing = "reading the fleet's record"
        self._troubled(self._link.trouble(fleet_record.read(), self._give_back))
        if self.trouble:
            return
        self._agents.refresh()
        self.pulse.doing = "following attempts"
        self._follower.judge_lost()
        for live in list(self._lives.values()):
            self._placements.steer(live)
        self.pulse.doing = "placing jobs"
        seen = self.snapshot()
        self.seen(seen.devices)
        self.planned = plan(seen)
        if not self.holding:
            self._placements.apply(self.planned, {d.id: d for d in seen.devices})
        self.pulse.doing = "asking the agents"
        self._watch()
        self.leaks.look(self.fleet, self.holding)

    def _handle(self, messages: list[Any]) -> None:
        """What cannot be handled now, because the store takes nothing, waits for the next turn; all else is dropped."""
        while messages:
            kind, *rest = messages[0]
            try:
                self._handlers[kind](*rest)
            except NotStored:
                for message in messages:
                    self._inbox.put(message)
                raise
            except Exception:
                log.exception("a message of kind %s is dropped", kind)
            messages.pop(0)

    def _joined(self, fleet: FleetRecord, error: BaseException | None) -> None:
        """Nodes have a whole lease, from now on, to tell what runs there."""
        if self._link.joined(fleet, error):
            for live in self._lives.values():
                live.seen_s = time.monotonic()
            self.leaks.look_now()
            self.replaced = origin.replaced(home(), fleet.address, self._store.identity)

    def _give_back(self) -> None:
        """A cluster that is not ours gets back what we hold there; attempts save, and stop by themselves."""
        for live in list(self._lives.values()):
            for node in {part.node for part in live.parts}:
                self._follower.stop(node, live.job, live.epoch, "preempt")
        self._agents.dismiss()
        for attempt in reservations.held():
            reservations.release(attempt)

    def _cancel_damaged(self) -> None:
        """Jobs whose history cannot be trusted do not go on: one of them might run twice."""
        for job_id, why in self._jobs.damaged.items():
            record = self._jobs.get(job_id)
            if record is not None and record.job.state not in TERMINAL:
                reason = {"reason": f"its history in the job store is damaged: {why}"}
                self._jobs.record(Event(job_id, "cancelled", record.job.epoch, time.time(), reason))

    def _watch(self) -> None:
        for node, agent in self._agents.items():
            parts = [
                (live.part_key(i), p)
                for live in self._lives.values()
                for i, p in enumerate(live.parts)
                if p.node == node
            ]
            cursors = {key: part.cursor for key, part in parts}
            known = {key: "ended" if part.ended else part.phase for key, part in parts}
            for key, (cursor, phase) in agent.strangers.items():
                cursors[key], known[key] = cursor, phase
            self._agents.watch(node, cursors, known, WATCH_S)

    def snapshot(self) -> Snapshot:
        pools = self.fleet.pools if self.fleet else {}
        prices = {name: float(pool.get("price_per_hour", 0.0)) for name, pool in pools.items()}
        seen = observe.snapshot(time.time(), self._agents.items(), prices, self._jobs.all(), self._jobs.waiting())
        return replace(seen, throughput=self._throughput())

    def _watched(self, node: str, answer: Any) -> None:
        if isinstance(answer, BaseException):
            self._agents.failed(node, answer)
        else:
            self._follower.heard(node, answer)
