"""Client of the agents: the detached Ray actor of each running node, and a long poll of each.

The controller owns the state of a node (core/controller/nodes.py); `Agents.nodes` is its newest copy, for reading by
any thread.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.errors import Conflict, FleetError
from cluster.serialization import from_plain
from cluster.types import HostAddress, NodeFacts
from orchestrator.core.controller.messages import (
    AgentDied,
    AgentFailed,
    AgentStarted,
    Heartbeat,
    ListedNode,
    Message,
    NodesListed,
    PartUnreadable,
)
from orchestrator.core.controller.nodes import Node, away_reason
from orchestrator.runtime.agents import actors, code_delivery
from orchestrator.runtime.agents.actors import first_line, last_line
from orchestrator.runtime.agents.ray_calls import RAY
from orchestrator.runtime.agents.server_generation import ServerGeneration
from workers.errors import ControllerSuperseded
from workers.protocol.messages import AttemptStatus, InvalidMessage

log = logging.getLogger(__name__)

NO_FLEET = "no fleet is up"
CALL_TIMEOUT_S = 20.0
REFRESH_S = 1.0
LIMIT_S = 20.0
HEAD_LATE_S = 5.0
"""Seconds without a response from Ray's head after which no job is placed. Ray normally responds in milliseconds."""

MAX_REPLIES_PER_S = 500.0
"""Maximum rate of replies of all agents together: in large fleets, replies that contain only metrics are delayed."""

PAUSE_AFTER_FAILURE_S = 0.5
"""Pause after a failed watch. An actor that is restarting fails every call immediately."""

Data = dict[str, Any]


@dataclass(eq=False)
class AgentHandle:
    """The actor of one node, and the state of its polling.

    `poll_started_s` (monotonic): start of the current watch, None if there is none. `clock_s`: the node's own clock at
    its last reply; leases are granted from that time. `unreadable_output`: attempts whose ranks wrote unreadable
    output: {key: {"count", "reason"}}. `hung`: it is being ended because it did not respond.
    """

    node: str
    ray_id: str
    actor: Any
    poll_started_s: float | None = None
    pause_until_s: float = 0.0
    registered: bool = False
    listed: bool = False
    clock_s: float | None = None
    unreadable_output: dict[str, dict[str, Any]] = field(default_factory=dict)
    hung: bool = False


class Agents:
    """Agents by node name. Thread-safe. Only `call` and `stop_all` block; replies go to `post` as messages.

    `problem`: why no fleet is served, "" while one is, as last observed by the controller. `repaired` gets a node and a
    sentence on its repair. `last_called_s`: last time (monotonic) of `call` or `actor`, by node.
    """

    def __init__(self, post: Callable[[Message], None], repaired: Callable[[str, str], None] = lambda *_: None):
        self._post, self._repaired = post, repaired
        self._handles: dict[str, AgentHandle] = {}
        self._ray_id_by_node: dict[str, str] = {}
        self._start_deadline_s: dict[
            tuple[str, str], float
        ] = {}  # deadlines of agents being started, by node and Ray id
        self._cpus: dict[str, float] = {}
        self._without_our_code: set[str] = set()
        self._deliveries = code_delivery.CodeDeliveries()
        self._lock = threading.Lock()
        self._nodes_requested_s: float | None = None
        self._nodes_listed_s = 0.0
        self.nodes: Mapping[str, Node] = {}
        self.server_generation = ServerGeneration()
        self.problem = NO_FLEET
        self.last_called_s: dict[str, float] = {}

    def __getitem__(self, node: str) -> Node:
        if node not in self.nodes:
            raise FleetError(f"node {node} is not in the fleet", "`polyfleet status` lists the nodes")
        return self.nodes[node]

    def get(self, node: str) -> Node | None:
        return self.nodes.get(node)

    def facts_of(self, node: str) -> NodeFacts | None:
        """The newest facts of a node; None if it is unknown or has sent none."""
        row = self.nodes.get(node)
        return row.facts if row else None

    @property
    def generation(self) -> int:
        """Sent with each call that only the server in control may make."""
        return self.server_generation.number

    @property
    def superseded_by(self) -> str:
        """Why this server no longer controls the fleet; "" if it does."""
        return self.server_generation.superseded_by

    @property
    def server_address(self) -> HostAddress:
        """The machine of this server, as agents beside it name theirs."""
        return actors.own_address()

    def items(self) -> list[tuple[str, Node]]:
        return sorted(self.nodes.items())

    def ready(self) -> list[tuple[str, Node]]:
        return [(name, node) for name, node in self.items() if node.ready]

    def of_pool(self, pool: str) -> list[tuple[str, Node]]:
        return [(n, node) for n, node in self.ready() if node.facts is not None and node.facts.pool == pool]

    def away_reason(self, node: str) -> str:
        """Why data on `node` cannot be read now, as a clause to follow its name; "" if it can."""
        if self.problem:
            return f"which cannot be reached: {self.problem}"
        return away_reason(self.get(node), time.monotonic())

    def unreadable_output(self) -> list[tuple[str, dict[str, dict[str, Any]]]]:
        """(node, its attempts with unreadable output), see AgentHandle."""
        return [(handle.node, handle.unreadable_output) for handle in list(self._handles.values())]

    @property
    def head_silent_s(self) -> float:
        """Seconds for which the request for Ray's node list has been unanswered; 0 if there is none."""
        return time.monotonic() - self._nodes_requested_s if self._nodes_requested_s is not None else 0.0

    # -- commands of the controller

    def start(self, node: str, ray_id: str) -> None:
        """Start the agent of a node.

        One start at a time: a second one would slow down the first on a busy machine.
        """
        deliver = self._deliveries.deliver if ray_id in self._without_our_code else None
        limit_s = code_delivery.LIMIT_S if deliver else LIMIT_S
        with self._lock:
            self._ray_id_by_node[node] = ray_id
            if time.monotonic() < self._start_deadline_s.get((node, ray_id), 0.0):
                return
            self._start_deadline_s[node, ray_id] = time.monotonic() + limit_s
        make = partial(actors.start_agent, ray_id, self._cpus.get(ray_id, 0.0), deliver)
        RAY.submit(f"start the agent of {node}", make, limit_s, partial(self._handle_started, node, ray_id))

    def _handle_started(self, node: str, ray_id: str, actor: Any) -> None:
        """Store the handle of a started agent.

        Not if its node was dropped, or the cluster left, during the start: the node may have another name by now.
        """
        has_failed = isinstance(actor, BaseException)
        with self._lock:
            self._start_deadline_s.pop((node, ray_id), None)
            if self._ray_id_by_node.get(node) != ray_id:
                return
            if not has_failed:
                self._handles[node] = AgentHandle(node, ray_id, actor)
        self._post(AgentStarted(node, ray_id, first_line(actor) if has_failed else ""))

    def restart(self, node: str, ray_id: str, reason: str) -> None:
        """Restart a hung agent.

        Attempts keep running: supervisors are separate processes, and the next agent reads their records.
        """
        handle, state = self._handles.get(node), self.nodes.get(node)
        if handle is None or handle.ray_id != ray_id:
            return
        handle.poll_started_s, handle.hung = None, True
        self._repaired(node, reason)
        facts = state.facts if state else None
        RAY.submit(
            f"end the hung agent of {node}", lambda: actors.restart_hung_actor(handle.actor, facts), LIMIT_S, _log_error
        )

    def unwatch(self, node: str, ray_id: str) -> None:
        self._deliveries.forget(ray_id)
        with self._lock:
            self._start_deadline_s.pop((node, ray_id), None)
            if self._ray_id_by_node.get(node) == ray_id:
                del self._ray_id_by_node[node]
            handle = self._handles.get(node)
            if handle is not None and handle.ray_id == ray_id:
                del self._handles[node]

    def rest(self, node: str, ray_id: str) -> None:
        """End the agent of an idle node."""
        self.unwatch(node, ray_id)
        RAY.submit(f"end the idle agent of {node}", partial(actors.end_agent_of_node, ray_id), LIMIT_S, _log_error)

    def call_async(self, node: str, method: str, *args: Any, done: Callable[[BaseException | None], None]) -> None:
        """Call an agent's method without waiting; `done` gets None or the error, in another thread."""
        handle = self._handles.get(node)
        if handle is None:
            done(FleetError(f"node {node} has no agent now", "nothing to do: the server tries again"))
            return
        future = getattr(handle.actor, method).remote(self.generation, *args).future()
        future.add_done_callback(lambda f: done(f.exception()))

    # -- polling

    def refresh(self) -> None:
        """Read the list of nodes from Ray, at most once a second."""
        now = time.monotonic()
        if self._nodes_requested_s is None and now - self._nodes_listed_s > REFRESH_S:
            self._nodes_requested_s = now
            RAY.submit("list its nodes", actors.nodes, HEAD_LATE_S, self._handle_nodes)

    def _handle_nodes(self, rows: Any) -> None:
        if self._nodes_requested_s is None:
            return  # this list belongs to a cluster that was left
        self._nodes_requested_s, self._nodes_listed_s = None, time.monotonic()
        if isinstance(rows, BaseException):
            log.warning("Ray's head did not list its nodes: %s", first_line(rows))
            return
        worker_rows = [row for row in rows if row.alive and row.takes_work]
        self._cpus = {row.ray_id: row.cpus for row in worker_rows}
        self._post(
            NodesListed(tuple(ListedNode(r.ray_id, r.name, r.drain_left_s, r.cpus, r.pool) for r in worker_rows))
        )

    def idle_agents(self) -> list[str]:
        """Nodes whose agents have no poll in progress and need one."""
        now = time.monotonic()
        return [h.node for h in list(self._handles.values()) if h.poll_started_s is None and now >= h.pause_until_s]

    def poll(self, node: str, cursors: dict[str, int], last_phases: dict[str, str], timeout_s: float) -> None:
        """Start a long poll of `node`; its reply becomes a message.

        A new agent is first called with `hello`, then at once for its attempts.
        """
        handle = self._handles.get(node)
        if handle is None or handle.poll_started_s is not None:
            return
        handle.poll_started_s = started_s = time.monotonic()
        hello = not handle.registered
        method = handle.actor.register if hello else handle.actor.poll
        limit_s = timeout_s if handle.listed else 0.0
        gather_s = min(timeout_s, len(self._handles) / MAX_REPLIES_PER_S)
        arguments = () if hello else (cursors, last_phases, limit_s, handle.clock_s, gather_s)
        future = method.remote(self.generation, *arguments).future()
        future.add_done_callback(lambda f: self._handle_reply(handle, started_s, f, hello))

    def _handle_reply(self, handle: AgentHandle, started_s: float, future: Any, hello: bool) -> None:
        if self._handles.get(handle.node) is not handle or handle.poll_started_s != started_s:
            return  # the node left, or the agent was declared hung, before this reply came
        error, handle.poll_started_s = future.exception(), None
        if error is not None:
            self._handle_poll_error(handle, error)
            return
        handle.hung = False
        handle.registered, handle.listed, reply = True, not hello, future.result()
        handle.clock_s = reply["clock_s"]
        if hello:
            self.server_generation.handle_newest(handle.node, int(reply.get("generation", 0)))
        else:
            self.server_generation.handle_obeyed(handle.node)
        for message in self._messages(handle, started_s, reply, hello):
            self._post(message)

    def _handle_poll_error(self, handle: AgentHandle, error: BaseException) -> None:
        import ray

        was_registered, handle.pause_until_s, handle.registered = (
            handle.registered,
            time.monotonic() + PAUSE_AFTER_FAILURE_S,
            False,
        )
        if isinstance(error, ray.exceptions.RayTaskError):
            log.error("node %s: %s", handle.node, error.cause)
            if isinstance(error.cause, ControllerSuperseded):
                self.server_generation.handle_newest(handle.node, error.cause.newest)
            elif not isinstance(error.cause, Conflict):
                reason = f"its agent fails: {error.cause!r}; check that it has the server's Polyfleet version"
                self._post(AgentFailed(handle.node, handle.ray_id, reason))
        if isinstance(error, ray.exceptions.RayActorError):
            is_dead = isinstance(error, ray.exceptions.ActorDiedError)
            if is_dead:  # permanently: polling it again while the next one starts would fail with the same error
                self._remove_handle(handle)
            reason = self._start_failure_reason(handle, str(error)) if is_dead and not was_registered else ""
            if was_registered and not (handle.hung or self._is_node_restarting(handle.node)):
                self._repaired(handle.node, f"the agent of {handle.node} had ended and was started again")
            self._post(AgentDied(handle.node, handle.ray_id, is_dead, reason))

    def _remove_handle(self, handle: AgentHandle) -> None:
        with self._lock:
            if self._handles.get(handle.node) is handle:
                del self._handles[handle.node]

    def _start_failure_reason(self, handle: AgentHandle, error: str) -> str:
        """Why an agent never started; "" if only our code is missing on its node: the next try sends it."""
        if code_delivery.is_missing_our_code(error) and handle.ray_id not in self._without_our_code:
            self._without_our_code.add(handle.ray_id)
            return ""
        return f"its agent cannot start: {last_line(error)}"

    def _is_node_restarting(self, name: str) -> bool:
        """Whether the complete node was restarted a moment ago, which is reported separately."""
        node = self.nodes.get(name)
        return node is not None and node.is_restarting(time.monotonic())

    def _messages(self, handle: AgentHandle, requested_s: float, reply: Data, hello: bool) -> list[Message]:
        """Convert a reply to messages for the controller. An invalid status affects its own attempt only."""
        if hello:
            epochs = {str(job): int(epoch) for job, epoch in reply.get("epochs", {}).items()}
            return [Heartbeat(handle.node, handle.ray_id, requested_s, _facts(reply["facts"]), epochs=epochs)]
        self._update_unreadable_output(handle, reply["unreadable_output"])
        statuses: list[AttemptStatus] = []
        unreadable: list[Message] = []
        for data in reply["reports"]:
            try:
                statuses.append(AttemptStatus.parse(data))
            except InvalidMessage as e:
                unreadable += _part_unreadable(handle.node, data, f"it {e}")
        facts = _facts(reply["facts"]) if reply["facts"] else None
        running = frozenset(reply["attempts"])
        return [*unreadable, Heartbeat(handle.node, handle.ray_id, requested_s, facts, tuple(statuses), running)]

    def _update_unreadable_output(self, handle: AgentHandle, unreadable: dict[str, dict[str, Any]]) -> None:
        for key in unreadable.keys() - handle.unreadable_output.keys():
            log.warning("attempt %s on %s wrote invalid output: %s", key, handle.node, unreadable[key]["reason"])
        handle.unreadable_output = unreadable

    # -- calls by other parts of the server

    def call(self, node: str, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call an agent and wait for its reply. Raises PolyfleetError as the agent raised it, else FleetError."""
        return actors.get_result(getattr(self.actor(node), method).remote(*args), f"node {node}: {method}", timeout_s)

    def actor(self, node: str) -> Any:
        """The node's actor. Raises FleetError if the node is resting or its agent is still being started."""
        handle = self._handles.get(self[node].name)
        self.last_called_s[node] = time.monotonic()
        if handle is None and self[node].resting:
            raise FleetError(f"node {node} is resting and has no agent", f"`polyfleet node resume {node}` wakes it")
        if handle is None:
            raise FleetError(f"node {node} has no agent yet", "its agent is being started: try again")
        return handle.actor

    def stop_all(self) -> None:
        """End every agent permanently. Waits for Ray."""
        for handle in list(self._handles.values()):
            actors.end_actor(handle.actor)

    def clear(self) -> None:
        """Drop all handles: they belong to a cluster that was left."""
        with self._lock:
            self._handles.clear()
            self._ray_id_by_node.clear()
            self._start_deadline_s.clear()
        self._deliveries.clear()
        self._nodes_requested_s, self._nodes_listed_s = None, 0.0


def _facts(plain: Data) -> NodeFacts:
    return from_plain(NodeFacts, plain)


def _part_unreadable(node: str, data: Any, reason: str) -> list[Message]:
    try:
        job, epoch, rank = str(data["job"]), int(data["epoch"]), int(data["node_rank"])
    except (TypeError, KeyError, ValueError):
        log.error("node %s: an invalid status is dropped: %s", node, reason)
        return []
    cursor = data["cursor"] if isinstance(data.get("cursor"), int) else None
    reason = f"the status that node {node} sent is invalid: {reason}"
    return [PartUnreadable(job, epoch, rank, reason, cursor, data.get("phase") == "ended")]


def _log_error(result: Any) -> None:
    if isinstance(result, BaseException):
        log.warning("ending an agent failed: %s", first_line(result))
