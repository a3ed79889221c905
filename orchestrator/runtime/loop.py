"""The controller's one thread: observe, plan, apply; woken by every report, submission and cancellation."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cluster import connect, fleet_record
from cluster.errors import PolyfleetError
from cluster.fleet_record import FleetRecord
from orchestrator.core.model import Plan, Snapshot
from orchestrator.core.plan import plan
from orchestrator.core.throughput import Throughput
from orchestrator.runtime import observe, reservations
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.follow import Follower
from orchestrator.runtime.jobs import Jobs, NotStored
from orchestrator.runtime.launch import Launcher
from orchestrator.runtime.live import Live, live_of
from orchestrator.runtime.placements import Placements
from orchestrator.store import EventStore

log = logging.getLogger(__name__)

TURN_S = 0.5
REFRESH_S = 1.0
WATCH_S = 2.0


def told_until(store: EventStore, live: Live) -> float:
    """Time of the newest report or checkpoint of this attempt in the store."""
    reported: list[float] = [r["time"] for r in store.reports(live.job) if r["epoch"] == live.epoch]
    saved = [e.time_s for e in store.events_of(live.job) if (e.event, e.epoch) == ("checkpoint", live.epoch)]
    return max([0.0, *reported[-1:], *saved[-1:]])


class Runtime(threading.Thread):
    """`trouble` is "" or why no fleet is served now. `planned` is the newest plan, for `explain` and `jobs`."""

    def __init__(
        self,
        jobs: Jobs,
        store: EventStore,
        agents: Agents,
        launcher: Launcher,
        inbox: "queue.SimpleQueue[Any]",
        throughput: Callable[[], Throughput] = Throughput,
    ):
        super().__init__(name="runtime", daemon=True)
        self._jobs, self._agents, self._inbox = jobs, agents, inbox
        self._throughput = throughput
        self.trouble, self.planned = "no fleet is up", Plan()
        self._lives: dict[str, Live] = {r.job.id: live for r in jobs.all() if (live := live_of(r))}
        for live in self._lives.values():
            live.told_s = told_until(store, live)
        self._follower = Follower(jobs, store, agents, self._lives)
        self._placements = Placements(jobs, self._lives, launcher, self._follower, inbox)
        self._handlers: dict[str, Callable[..., None]] = {
            "watched": self._watched,
            "launched": self._placements.launched,
            "launch_failed": self._placements.launch_failed,
        }
        self._fleet: FleetRecord | None = None
        self._refreshed_s = 0.0
        self._closing = threading.Event()

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        self._closing.set()
        self.wake()
        self.join(timeout=10)
        self._placements.close()
        if self._fleet:
            connect.disconnect()

    def run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn(self._drain())
            except PolyfleetError as e:
                self.trouble = str(e)
                log.warning("%s", e)
                self._closing.wait(TURN_S)
            except Exception:
                log.exception("this turn failed; the next one starts from what is stored")
                self._closing.wait(TURN_S)

    def _drain(self) -> list[Any]:
        messages = []
        try:
            messages.append(self._inbox.get(timeout=TURN_S))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return [m for m in messages if m is not None]

    def _turn(self, messages: list[Any]) -> None:
        if not self._joined():
            return
        self._handle(messages)
        self._refresh()
        self._follower.judge_lost()
        for live in list(self._lives.values()):
            self._placements.steer(live)
        seen = self.snapshot()
        self.planned = plan(seen)
        self._placements.apply(self.planned, {d.id: d for d in seen.devices})
        self._watch()

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

    def _joined(self) -> bool:
        """Whether we are in the recorded fleet's Ray cluster; joins it when it is new."""
        fleet = fleet_record.read()
        if fleet is not None and fleet.state == "leaving":
            self._leave(fleet)
        if fleet is None or fleet.state != "up":
            self.trouble = "no fleet is up" if fleet is None else f"the fleet is {fleet.state}"
            return False
        if fleet.headless:
            self.trouble = "the fleet's head is gone; `polyfleet up` starts a new one and jobs go on from checkpoints"
            return False
        if self._fleet is None or self._fleet.address != fleet.address:
            if self._fleet is not None:
                connect.disconnect()
                self._agents.clear()
            connect.prepare(fleet)
            connect.connect(fleet)
            self._drop_stale_reservations()
        self._fleet, self.trouble = fleet, ""
        return True

    def _leave(self, fleet: FleetRecord) -> None:
        """A cluster that is not ours gets back what we hold there; attempts save, and stop by themselves."""
        if self._fleet is not None:
            for live in self._lives.values():
                for node in {part.node for part in live.parts}:
                    self._follower.stop(node, live.job, live.epoch, "preempt")
            self._agents.dismiss()
            for attempt in reservations.held():
                reservations.release(attempt)
            connect.disconnect()
            self._fleet = None
        fleet_record.write(replace(fleet, state="left"))

    def _drop_stale_reservations(self) -> None:
        for attempt in set(reservations.held()) - {live.key for live in self._lives.values()}:
            reservations.release(attempt)

    def _refresh(self) -> None:
        if time.monotonic() - self._refreshed_s > REFRESH_S:
            self._agents.refresh()
            self._refreshed_s = time.monotonic()

    def _watch(self) -> None:
        for node, _ in self._agents.items():
            parts = [
                (live.part_key(i), p)
                for live in self._lives.values()
                for i, p in enumerate(live.parts)
                if p.node == node
            ]
            cursors = {key: part.cursor for key, part in parts}
            known = {key: "ended" if part.ended else part.phase for key, part in parts}
            self._agents.watch(node, cursors, known, WATCH_S)

    def snapshot(self) -> Snapshot:
        pools = self._fleet.pools if self._fleet else {}
        prices = {name: float(pool.get("price_per_hour", 0.0)) for name, pool in pools.items()}
        seen = observe.snapshot(time.time(), self._agents.items(), prices, self._jobs.all(), self._jobs.waiting())
        return replace(seen, throughput=self._throughput())

    def _watched(self, node: str, answer: Any) -> None:
        if isinstance(answer, BaseException):
            self._agents.failed(node, answer)
        else:
            self._follower.heard(node, answer)
