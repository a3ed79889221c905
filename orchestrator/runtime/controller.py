"""The controller's thread: apply messages from the inbox, store the events, execute the commands.

All decisions are in core/control.py. The thread waits only for its inbox and the store.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from cluster import fleet_record
from cluster.errors import FleetError, PolyfleetError
from cluster.fleet_record import FleetRecord
from cluster.paths import home
from orchestrator import installed_policies, node_groups
from orchestrator.core import control
from orchestrator.core import messages as m
from orchestrator.core.commands import Command
from orchestrator.core.draft import Control
from orchestrator.core.messages import Message
from orchestrator.core.model import Devices, Plan, Snapshot
from orchestrator.core.nodes import OWNER, drained
from orchestrator.core.placement import snapshot
from orchestrator.core.policy import Policy, Project
from orchestrator.core.throughput import History, Throughput
from orchestrator.runtime import crash_hook, reservations
from orchestrator.runtime.agents import HEAD_LATE_S, Agents
from orchestrator.runtime.command_executor import Carrier
from orchestrator.runtime.inbox import Inbox
from orchestrator.runtime.jobs import Jobs
from orchestrator.runtime.launch import Launcher
from orchestrator.runtime.leave_cluster import give_back
from orchestrator.runtime.liveness import Pulse
from orchestrator.runtime.log_preservation import Keeping
from orchestrator.runtime.ray_calls import RAY
from orchestrator.runtime.ray_link import Link, before_joining
from orchestrator.runtime.repair import RepairThread
from orchestrator.runtime.step_batch import TURN_S, Steps, now
from orchestrator.store import origin
from orchestrator.store.event_store import EventStore

log = logging.getLogger(__name__)

SOON_S = 0.02
"""Seconds until the next cycle when the state has changed and planning is paused (see core/placement.py)."""

TURN_SHARE = 0.5
GATHER_S = 0.02
"""After a cycle the thread rests as long as the cycle took (TURN_SHARE: half of a core), at most GATHER_S seconds.
Messages that arrive during the rest share the next cycle.
"""

WATCH_S = 2.0
RESERVED_EVERY_S = 60.0
COMPARE_AGAIN_S = 60.0
LIMIT_S = 10.0


class Runtime(threading.Thread):
    """The controller's thread and its state for other threads.

    `holding`: why no job is placed, or "". `replaced`: the fleet was started with another database. `seen` is called
    with the devices when nodes come or go; `heard` with the last contact of each node when the server loses the fleet
    or ends. `measured`: throughput and history of workloads at the newest tick.
    """

    def __init__(
        self,
        jobs: Jobs,
        store: EventStore,
        agents: Agents,
        launcher: Launcher,
        inbox: Inbox,
        keeping: Keeping,
        throughput: Callable[[], Throughput] = Throughput,
        liveness: Pulse | None = None,
        repair: RepairThread | None = None,
        history: Callable[[], History] = History,
    ):
        super().__init__(name="controller", daemon=True)
        self._jobs, self._store, self._agents, self._inbox = jobs, store, agents, inbox
        self._throughput, self._history, self._repair = throughput, history, repair
        self.measured = Throughput(), History()
        self.pulse = liveness or Pulse()
        self.replaced = False
        self.seen: Callable[[tuple[Devices, ...]], None] = lambda _: None
        self.heard: Callable[[dict[str, float]], None] = lambda _: None
        self._nodes_told: frozenset[tuple[str, bool]] = frozenset()
        self._trouble_since_s = time.monotonic()
        self._record: FleetRecord | None = None
        self._groups = node_groups.Known()
        self._unread = ""
        self._compared, self._compare_at_s = "", 0.0
        self._reserved_s = 0.0
        self._turn_due_s = 0.0
        self._ticked = True
        self._closing = threading.Event()
        agents.generation = store.next_generation()
        self._link = Link(agents, self._inbox.put)
        agents.trouble = before_joining(self._recorded())
        self._carrier = Carrier(agents, launcher, store, jobs, self._inbox.put, keeping, repair)
        drained_nodes = drained(e for e in store.events_below(OWNER))
        reported = store.last_reports([record.job.id for record in jobs.open() if record.attempts])
        initial = control.resumed(jobs.open(), drained_nodes, store.told_at, now(), reported)
        self._steps = Steps(jobs, initial, self._stored, self._storing)
        for job_id, reason in jobs.damaged.items():
            # A job with a damaged history is cancelled: otherwise it might run twice.
            self.post(m.CancelAsked(job_id, f"its history in the job store is damaged: {reason}"))

    # -- for other threads

    def post(self, message: Message) -> None:
        self._inbox.put(message)

    def ask(self, message: Message) -> None:
        """Post a message and wait until its effect is durable; see Inbox.ask."""
        self._inbox.ask(message, lambda: self.pulse.doing)

    @property
    def control(self) -> Control:
        return self._steps.control

    @property
    def planned(self) -> Plan:
        return self.control.plan

    @property
    def trouble(self) -> str:
        """Why no fleet is served now, or ""."""
        return self._agents.trouble

    @property
    def trouble_s(self) -> float:
        """Seconds for which no fleet has been served; 0 while one is."""
        return time.monotonic() - self._trouble_since_s if self.trouble else 0.0

    @property
    def holding(self) -> str:
        silent_s = self._agents.head_silent_s
        silent = f"Ray's head has not answered for {silent_s:.0f} s" if silent_s > HEAD_LATE_S else ""
        return self._link.holding or self._unread or silent

    @property
    def fleet(self) -> FleetRecord | None:
        """The record of the cluster that this process has joined, or None."""
        return self._link.fleet

    @property
    def repairs(self) -> bool:
        """Whether this server restarts lost nodes: only those of a fleet that it runs itself."""
        return self._repair is not None and (self.fleet is None or self.fleet.embedded)

    def snapshot(self) -> Snapshot:
        return snapshot(self.control, now(), self._throughput())

    def close(self) -> None:
        self._closing.set()
        self._inbox.put(None)
        self.join(timeout=10)
        if not self.trouble:
            self._tell_heard()
        self._carrier.close()
        self._link.close()

    # -- the thread

    def run(self) -> None:
        while not self._closing.is_set():
            self.pulse.doing = "waiting for messages"
            self._inbox.drain(self._wait_s(), self._turn_due_s, self._closing)
            used_s = time.thread_time()
            try:
                self._turn()
                self.pulse.ended()
                rest_s = (time.thread_time() - used_s) * (1 / TURN_SHARE - 1)
                self._turn_due_s = time.monotonic() + min(rest_s, GATHER_S)
            except PolyfleetError as e:
                self._inbox.refuse_asks(e)
                self._failed(str(e))
            except Exception as e:
                if repr(e) != self.pulse.failing:
                    log.exception("this cycle failed; the next one processes its messages again")
                self._inbox.refuse_asks(FleetError(f"internal error: {e!r}", "its traceback is in the server's log"))
                self._failed(repr(e))

    def _failed(self, error: str) -> None:
        if error != self.pulse.failing:
            log.warning("%s", error)
        self.pulse.ended(error)
        self._closing.wait(TURN_S)

    def _troubled(self, reason: str) -> None:
        if reason and not self.trouble:
            self._trouble_since_s = time.monotonic()
            self._tell_heard()
        self._agents.trouble = reason

    def _tell_heard(self) -> None:
        at = now()
        self.heard({node.name: at.wall_s - node.silent_s(at.s) for node in self.control.nodes.values()})

    def _wait_s(self) -> float:
        if not (self.control.changed and self.control.joined) or self.control.trouble:
            return TURN_S
        left_s = self._steps.tick_due_s - time.monotonic()
        return SOON_S if self._ticked else max(0.0, left_s)

    def _turn(self) -> None:
        """Run one cycle. Messages stay in the inbox until all events that follow from them are stored."""
        self.pulse.doing = "reading the fleet's record"
        cluster_messages = self._linked(self._recorded())
        self._inbox.kept += cluster_messages
        self.pulse.doing = "deciding"
        items = [*self._inbox.kept, *self._tick()]
        try:
            commands = self._steps.take(items)
        finally:
            self._inbox.kept = [item for item in items if not isinstance(item, m.Tick)]
        self._carry(commands)
        self._tell_devices()
        self.pulse.doing = "polling the agents"
        if not self.trouble:
            self._look()

    def _recorded(self) -> FleetRecord | None:
        """Read the fleet's record. While it cannot be read, the last one is used and no job is placed."""
        try:
            self._record, self._unread = fleet_record.read(), ""
        except (PolyfleetError, OSError) as e:
            if not self._unread:
                log.warning("the fleet's record cannot be read: %s", e)
            self._unread = f"the fleet's record cannot be read: {e}"
        return self._record

    def _stored(self, state: Control) -> None:
        self._agents.nodes = state.nodes

    def _storing(self) -> None:
        self.pulse.doing = "writing to the job store"

    def _tick(self) -> list[m.Tick]:
        """The tick of this cycle; empty if the last one took long and the next is not due."""
        self._ticked = time.monotonic() >= self._steps.tick_due_s
        if not self._ticked:
            return []
        running, recorded = self._workers()
        trouble = self.trouble or self.holding
        groups = self._groups.of(self.fleet.pools) if self.fleet else ()
        self._carrier.keeping.pools = frozenset(group.pool for group in groups)
        called = dict(self._agents.called) if groups else {}
        self.measured = throughput, history = self._throughput(), self._history()
        fleet_fields = running, recorded, self.repairs, groups, called
        settings = self._policy(), self._projects()
        return [m.Tick(throughput, trouble, self._prices(), *fleet_fields, history, *settings)]

    def _workers(self) -> tuple[frozenset[str], frozenset[str]]:
        """Worker nodes of the fleet's record: (those believed to be running, all)."""
        if self.fleet is None:
            return frozenset(), frozenset()
        both = self.fleet.living(), self.fleet.processes
        running, recorded = (frozenset(p.node for p in group if p.role == "worker") for group in both)
        return running, recorded

    def _tell_devices(self) -> None:
        nodes = frozenset((node.ray_id, node.facts is not None) for node in self.control.nodes.values())
        if nodes != self._nodes_told:
            self._nodes_told = nodes
            self.seen(self.snapshot().possible)

    def _linked(self, recorded: FleetRecord | None) -> list[Message]:
        """Update our membership in the fleet's Ray cluster; return messages about changes for the controller."""
        for kind, *rest in self._inbox.of_the_link():
            handle: Callable[..., Any] = getattr(self._link, kind)  # joined, left or parted
            handle(*rest)
        trouble = self._link.trouble(recorded, self._give_back)
        self._troubled((trouble and self._unread) or trouble)
        if self._agents.overtaken and self._repair:
            self._repair.close()
        fleet, link_changes = self._link.fleet, [i for i in self._inbox.kept if isinstance(i, m.Joined | m.Parted)]
        joined = isinstance(link_changes[-1], m.Joined) if link_changes else self.control.joined
        if fleet is None and joined:
            return [m.Parted(over=recorded is None or recorded.state != "up")]
        if fleet is not None and not joined:
            self._reserved_s = 0.0
            return [m.Joined()]
        return []

    def _give_back(self) -> None:
        scaling = self.control.scaling
        grows = bool(scaling.groups or scaling.asked or scaling.asking)
        give_back(self._agents, list(self.control.lives.values()), grows)

    def _compare_origin(self, fleet: FleetRecord) -> None:
        """Compare our database with the one that the fleet was started with.

        Retried later if the disk is full.
        """
        try:
            self.replaced = origin.replaced(home(), fleet.address, self._store.identity)
            self._compared = fleet.address
        except OSError as e:
            log.warning("the identity of the fleet's database could not be saved; it will be retried: %s", e)
            self._compare_at_s = time.monotonic() + COMPARE_AGAIN_S

    def _prices(self) -> dict[str, float]:
        pools = self.fleet.pools if self.fleet else {}
        return {name: float(pool.get("price_per_hour") or 0.0) for name, pool in pools.items()}

    def _policy(self) -> Policy:
        spec = self.fleet.policy_spec if self.fleet else {}
        policy = Policy(**{name: value for name, value in spec.items() if name in Policy.__slots__})
        installed_policies.expect(policy.name)
        return policy

    def _projects(self) -> dict[str, Project]:
        specs = self.fleet.projects if self.fleet else {}
        return {name: Project(project["quota"], project["borrow"]) for name, project in specs.items()}

    def _carry(self, commands: list[Command]) -> None:
        for command in commands:
            crash_hook.point(f"command:{type(command).__name__}:before")
            try:
                self._carrier.carry(command)
            except Exception:
                log.exception("%s could not be started", command)
            crash_hook.point(f"command:{type(command).__name__}:after")

    def _look(self) -> None:
        """Poll for changes: Ray's nodes and reservations, and each agent's attempts."""
        if self.fleet and self.fleet.address != self._compared and time.monotonic() >= self._compare_at_s:
            self._compare_origin(self.fleet)
        self._agents.refresh()
        if self._agents.floor > self._agents.generation:
            self._agents.generation = self._store.next_generation(self._agents.floor)
        for node in self._agents.unwatched():
            cursors, last_phases = control.watch_of(self.control, node)
            self._agents.watch(node, cursors, last_phases, WATCH_S)
        if time.monotonic() - self._reserved_s > RESERVED_EVERY_S and not self.holding:
            self._reserved_s = time.monotonic()
            RAY.ask("list reserved devices", reservations.list_held, LIMIT_S, self._held)

    def _held(self, reserved: Any) -> None:
        if not isinstance(reserved, BaseException):
            self.post(m.Reserved(reserved))
