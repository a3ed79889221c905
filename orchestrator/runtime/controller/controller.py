"""The controller's thread: apply messages from the inbox, store the events, execute the commands.

All decisions are in core/step/control.py. The thread waits only for its inbox and the store.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from cluster.errors import FleetError, PolyfleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord
from cluster.paths import home
from orchestrator.core.attempt.story import StoryLine
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Command
from orchestrator.core.controller.draft import Control
from orchestrator.core.controller.messages import Message
from orchestrator.core.controller.nodes import OWNER_PREFIX, drained_nodes
from orchestrator.core.model import Devices, Plan, Policy, Project, Snapshot
from orchestrator.core.step import control
from orchestrator.core.step.placement import snapshot
from orchestrator.core.throughput import History, Throughput
from orchestrator.runtime import crash_points
from orchestrator.runtime.agents import reservations
from orchestrator.runtime.agents.agents import HEAD_LATE_S, Agents
from orchestrator.runtime.agents.leave_cluster import leave_cluster
from orchestrator.runtime.agents.ray_calls import RAY
from orchestrator.runtime.agents.ray_link import RayLink, before_joining
from orchestrator.runtime.clock import now
from orchestrator.runtime.controller.command_executor import CommandExecutor
from orchestrator.runtime.controller.inbox import Inbox, Liveness
from orchestrator.runtime.controller.launch import Launcher
from orchestrator.runtime.controller.repair import RepairThread
from orchestrator.runtime.controller.step_batch import CYCLE_S, StepBatch
from orchestrator.runtime.jobs.histories import newest_metrics
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.runtime.jobs.log_preservation import LogPreservation
from orchestrator.spec import installed_policies, node_groups
from orchestrator.store.events.database_setting import is_other_database
from orchestrator.store.events.event_store import EventStore

log = logging.getLogger(__name__)

PLAN_PAUSE_S = 0.02
"""Seconds until the next cycle when the state has changed and planning is paused (see core/step/placement.py)."""

MAX_LOAD = 0.5
MAX_REST_S = 0.02
"""After a cycle the thread rests as long as the cycle took (MAX_LOAD: half of a core), at most MAX_REST_S seconds.
Messages that arrive during the rest share the next cycle.
"""

POLL_S = 2.0
LIST_RESERVED_EVERY_S = 60.0
COMPARE_RETRY_S = 60.0
LIMIT_S = 10.0


class ControllerThread(threading.Thread):
    """The controller's thread and its state for other threads.

    `hold_reason`: why no job is placed, or "". `database_replaced`: the fleet was started with another database.
    `on_devices` is called with the devices when nodes come or go; `on_last_contacts` with the last contact of each node
    when the server loses the fleet or ends. `measurements`: throughput and history of workloads at the newest tick.
    """

    def __init__(
        self,
        jobs: Jobs,
        store: EventStore,
        agents: Agents,
        launcher: Launcher,
        inbox: Inbox,
        log_preservation: LogPreservation,
        throughput: Callable[[], Throughput] = Throughput,
        liveness: Liveness | None = None,
        repair: RepairThread | None = None,
        history: Callable[[], History] = History,
    ):
        super().__init__(name="controller", daemon=True)
        self._jobs, self._store, self._agents, self._inbox = jobs, store, agents, inbox
        self._throughput, self._history, self._repair = throughput, history, repair
        self.measurements = Throughput(), History()
        self.liveness = liveness or Liveness()
        self.database_replaced = False
        self.on_devices: Callable[[tuple[Devices, ...]], None] = lambda _: None
        self.on_last_contacts: Callable[[dict[str, float]], None] = lambda _: None
        self._nodes_reported: frozenset[tuple[str, bool]] = frozenset()
        self._trouble_since_s = time.monotonic()
        self._record: FleetRecord | None = None
        self._groups = node_groups.NodeGroupCache()
        self._record_error = ""
        self._compared_address, self._compare_at_s = "", 0.0
        self._reserved_s = 0.0
        self._turn_due_s = 0.0
        self._has_ticked = True
        self._closing = threading.Event()
        agents.server_generation.number = store.next_generation()
        self._link = RayLink(agents, self._inbox.put)
        agents.problem = before_joining(self._read_record())
        self._executor = CommandExecutor(agents, launcher, self._inbox.put, log_preservation, repair)
        drained = drained_nodes(e for e in store.events_below(OWNER_PREFIX))
        reported = store.metrics.last_of([record.job.id for record in jobs.open() if record.attempts])
        earlier = newest_metrics(jobs, store)
        initial = control.control_from_log(jobs.open(), drained, store.stored_offset, now(), reported, earlier)
        self._steps = StepBatch(jobs, initial, self._publish_state, self._before_write)
        for job_id, reason in jobs.damaged.items():
            # A job with a damaged history is cancelled: otherwise it might run twice.
            self.post(m.CancelRequested(job_id, f"its history in the job store is damaged: {reason}"))

    # -- for other threads

    def post(self, message: Message) -> None:
        self._inbox.put(message)

    def post_and_wait(self, message: Message) -> None:
        """Post a message and wait until its effect is durable; see Inbox.post_and_wait."""
        self._inbox.post_and_wait(message, lambda: self.liveness.activity)

    @property
    def control(self) -> Control:
        return self._steps.control

    @property
    def story(self) -> list[StoryLine]:
        """The newest lines of the story of all jobs, oldest first."""
        return self._steps.story.lines()

    @property
    def plan(self) -> Plan:
        return self.control.plan

    @property
    def problem(self) -> str:
        """Why no fleet is served now, or ""."""
        return self._agents.problem

    @property
    def problem_s(self) -> float:
        """Seconds for which no fleet has been served; 0 while one is."""
        return time.monotonic() - self._trouble_since_s if self.problem else 0.0

    @property
    def hold_reason(self) -> str:
        silent_s = self._agents.head_silent_s
        silent = f"Ray's head has not answered for {silent_s:.0f} s" if silent_s > HEAD_LATE_S else ""
        return self._link.hold_reason or self._record_error or silent

    @property
    def fleet(self) -> FleetRecord | None:
        """The record of the cluster that this process has joined, or None."""
        return self._link.fleet

    @property
    def repairs_nodes(self) -> bool:
        """Whether this server restarts lost nodes: only those of a fleet that it runs itself."""
        return self._repair is not None and (self.fleet is None or self.fleet.is_embedded)

    def snapshot(self) -> Snapshot:
        return snapshot(self.control, now(), self._throughput())

    def close(self) -> None:
        self._closing.set()
        self._inbox.put(None)
        self.join(timeout=10)
        if not self.problem:
            self._publish_last_contacts()
        self._executor.close()
        self._link.close()

    # -- the thread

    def run(self) -> None:
        while not self._closing.is_set():
            self.liveness.activity = "waiting for messages"
            self._inbox.drain(self._wait_s(), self._turn_due_s, self._closing)
            used_s = time.thread_time()
            try:
                self._cycle()
                self.liveness.cycle_ended()
                rest_s = (time.thread_time() - used_s) * (1 / MAX_LOAD - 1)
                self._turn_due_s = time.monotonic() + min(rest_s, MAX_REST_S)
            except PolyfleetError as e:
                self._inbox.refuse_requests(e)
                self._cycle_failed(str(e))
            except Exception as e:
                if repr(e) != self.liveness.error:
                    log.exception("this cycle failed; the next one processes its messages again")
                self._inbox.refuse_requests(
                    FleetError(f"internal error: {e!r}", "its traceback is in the server's log")
                )
                self._cycle_failed(repr(e))

    def _cycle_failed(self, error: str) -> None:
        if error != self.liveness.error:
            log.warning("%s", error)
        self.liveness.cycle_ended(error)
        self._closing.wait(CYCLE_S)

    def _set_problem(self, reason: str) -> None:
        if reason and not self.problem:
            self._trouble_since_s = time.monotonic()
            self._publish_last_contacts()
        self._agents.problem = reason

    def _publish_last_contacts(self) -> None:
        at = now()
        self.on_last_contacts({node.name: at.wall_s - node.silent_s(at.s) for node in self.control.nodes.values()})

    def _wait_s(self) -> float:
        if not (self.control.needs_plan and self.control.is_joined) or self.control.problem:
            return CYCLE_S
        left_s = self._steps.tick_due_s - time.monotonic()
        return PLAN_PAUSE_S if self._has_ticked else max(0.0, left_s)

    def _cycle(self) -> None:
        """Run one cycle. Messages stay in the inbox until all events that follow from them are stored."""
        self.liveness.activity = "reading the fleet's record"
        cluster_messages = self._update_membership(self._read_record())
        self._inbox.pending += cluster_messages
        self.liveness.activity = "deciding"
        items = [*self._inbox.pending, *self._tick()]
        try:
            commands = self._steps.apply(items)
        finally:
            self._inbox.pending = [item for item in items if not isinstance(item, m.Tick)]
        self._execute(commands)
        self._publish_devices()
        self.liveness.activity = "polling the agents"
        if not self.problem:
            self._poll()

    def _read_record(self) -> FleetRecord | None:
        """Read the fleet's record. While it cannot be read, the last one is used and no job is placed."""
        try:
            self._record, self._record_error = fleet_record.read(), ""
        except (PolyfleetError, OSError) as e:
            if not self._record_error:
                log.warning("the fleet's record cannot be read: %s", e)
            self._record_error = f"the fleet's record cannot be read: {e}"
        return self._record

    def _publish_state(self, state: Control) -> None:
        self._agents.nodes = state.nodes

    def _before_write(self) -> None:
        self.liveness.activity = "writing to the job store"

    def _tick(self) -> list[m.Tick]:
        """The tick of this cycle; empty if the last one took long and the next is not due."""
        self._has_ticked = time.monotonic() >= self._steps.tick_due_s
        if not self._has_ticked:
            return []
        running, recorded = self._workers()
        trouble = self.problem or self.hold_reason
        groups = self._groups.groups(self.fleet.pools) if self.fleet else ()
        self._executor.log_preservation.pools = frozenset(group.pool for group in groups)
        called = dict(self._agents.last_called_s) if groups else {}
        self.measurements = throughput, history = self._throughput(), self._history()
        fleet_fields = running, recorded, self.repairs_nodes, groups, called
        settings = self._policy(), self._projects()
        return [m.Tick(throughput, trouble, self._prices(), *fleet_fields, history, *settings)]

    def _workers(self) -> tuple[frozenset[str], frozenset[str]]:
        """Worker nodes of the fleet's record: (those believed to be running, all)."""
        if self.fleet is None:
            return frozenset(), frozenset()
        both = self.fleet.running(), self.fleet.processes
        running, recorded = (frozenset(p.node for p in group if p.role == "worker") for group in both)
        return running, recorded

    def _publish_devices(self) -> None:
        nodes = frozenset((node.ray_id, node.facts is not None) for node in self.control.nodes.values())
        if nodes != self._nodes_reported:
            self._nodes_reported = nodes
            self.on_devices(self.snapshot().possible)

    def _update_membership(self, recorded: FleetRecord | None) -> list[Message]:
        """Update our membership in the fleet's Ray cluster; return messages about changes for the controller."""
        for kind, *rest in self._inbox.take_link_messages():
            handle: Callable[..., Any] = getattr(self._link, kind)  # joined, left or disconnected
            handle(*rest)
        trouble = self._link.update(recorded, self._leave_cluster)
        self._set_problem((trouble and self._record_error) or trouble)
        if self._agents.superseded_by and self._repair:
            self._repair.close()
        fleet, link_changes = (
            self._link.fleet,
            [i for i in self._inbox.pending if isinstance(i, m.ClusterJoined | m.ClusterLeft)],
        )
        joined = isinstance(link_changes[-1], m.ClusterJoined) if link_changes else self.control.is_joined
        if fleet is None and joined:
            return [m.ClusterLeft(has_ended=recorded is None or recorded.state != "up")]
        if fleet is not None and not joined:
            self._reserved_s = 0.0
            return [m.ClusterJoined()]
        return []

    def _leave_cluster(self) -> None:
        scaling = self.control.scaling
        grows = bool(scaling.groups or scaling.confirmed_request or scaling.pending_request)
        leave_cluster(self._agents, list(self.control.attempts.values()), grows)

    def _compare_origin(self, fleet: FleetRecord) -> None:
        """Compare our database with the one that the fleet was started with.

        Retried later if the disk is full.
        """
        try:
            self.database_replaced = is_other_database(home(), fleet.address, self._store.identity)
            self._compared_address = fleet.address
        except OSError as e:
            log.warning("the identity of the fleet's database could not be saved; it will be retried: %s", e)
            self._compare_at_s = time.monotonic() + COMPARE_RETRY_S

    def _prices(self) -> dict[str, float]:
        pools = self.fleet.pools if self.fleet else {}
        return {name: float(pool.get("price_per_hour") or 0.0) for name, pool in pools.items()}

    def _policy(self) -> Policy:
        spec = self.fleet.policy_spec if self.fleet else {}
        policy = Policy(**{name: value for name, value in spec.items() if name in Policy.__slots__})
        installed_policies.register_expected(policy.name)
        return policy

    def _projects(self) -> dict[str, Project]:
        specs = self.fleet.projects if self.fleet else {}
        return {name: Project(project["quota"], project["borrow"]) for name, project in specs.items()}

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            crash_points.point(crash_points.command_point(command, crash_points.BEFORE))
            try:
                self._executor.execute(command)
            except Exception:
                log.exception("%s could not be started", command)
            crash_points.point(crash_points.command_point(command, crash_points.AFTER))

    def _poll(self) -> None:
        """Poll for changes: Ray's nodes and reservations, and each agent's attempts."""
        if self.fleet and self.fleet.address != self._compared_address and time.monotonic() >= self._compare_at_s:
            self._compare_origin(self.fleet)
        self._agents.refresh()
        self._agents.server_generation.rise(self._store.next_generation)
        for node in self._agents.idle_agents():
            cursors, last_phases = control.poll_arguments(self.control, node)
            self._agents.poll(node, cursors, last_phases, POLL_S)
        if time.monotonic() - self._reserved_s > LIST_RESERVED_EVERY_S and not self.hold_reason:
            self._reserved_s = time.monotonic()
            RAY.submit("list reserved devices", reservations.list_reserved_now, LIMIT_S, self._post_reserved)

    def _post_reserved(self, reserved: Any) -> None:
        if not isinstance(reserved, BaseException):
            self.post(m.ReservationsListed(reserved))
