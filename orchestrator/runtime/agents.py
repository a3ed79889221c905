"""The agents as this process reaches them: one detached Ray actor per living node, and the long poll of each.

What is known of a node is the controller's (core/nodes.py); `nodes` is its newest state, for whoever reads.
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
from cluster.types import NodeFacts
from orchestrator.core.messages import (
    AgentDied,
    AgentFailed,
    AgentMade,
    Heartbeat,
    Message,
    NodeSeen,
    NodesSeen,
    Spoiled,
)
from orchestrator.core.nodes import Node, away_reason
from orchestrator.runtime import actors, code_delivery
from orchestrator.runtime.actors import first_line, last_line
from orchestrator.runtime.ray_calls import RAY
from workers.errors import ControllerSuperseded
from workers.messages import AttemptStatus, InvalidMessage

log = logging.getLogger(__name__)

NO_FLEET = "no fleet is up"
CALL_TIMEOUT_S = 20.0
REFRESH_S = 1.0
LIMIT_S = 20.0
HEAD_LATE_S = 5.0
"""Ray answers within milliseconds; without an answer for so long nothing new is placed."""

ANSWERS_PER_S = 500.0
"""Of all agents together, as far as ranks only tell numbers: with many nodes those wait for each other."""

REST_S = 0.5
"""After a watch that failed: an actor that restarts fails them at once."""

Data = dict[str, Any]


@dataclass(eq=False)
class Handle:
    """The actor of one node. `asked_s` (monotonic) is of the watch under way, None while there is none; `clock_s` is of
    the node's own clock, at its last answer: its leases are given from then on. `poison` is of attempts whose ranks
    wrote what cannot be used: {key: {"count", "reason"}}. `hung`: it is being ended since it did not answer.
    """

    node: str
    ray_id: str
    actor: Any
    asked_s: float | None = None
    rest_until_s: float = 0.0
    greeted: bool = False
    listed: bool = False
    clock_s: float | None = None
    poison: dict[str, dict[str, Any]] = field(default_factory=dict)
    hung: bool = False


class Agents:
    """By node name. Safe to use from many threads; nothing waits, but `call`. Answers go to `post` as messages.

    `generation` is the controller's: agents refuse one that is older than one they have seen, and `floor` is the newest
    that was told of by nodes that we have just found: we have to count above it. A newer one that is told by a node
    which has obeyed us already is of a server that was started after this one: `overtaken` says so, and we do not count
    above that. `trouble` is why no fleet is served, as the controller last saw, "" while one is. `repaired` gets a node
    and what was done for it. `called`: when an agent was last asked for something by `call` or `actor`, by node
    (monotonic).
    """

    def __init__(self, post: Callable[[Message], None], repaired: Callable[[str, str], None] = lambda *_: None):
        self._post, self._repaired = post, repaired
        self._handles: dict[str, Handle] = {}
        self._wanted: dict[str, str] = {}
        self._made_by_s: dict[tuple[str, str], float] = {}  # of those being made, by name and Ray's id of the node
        self._cpus: dict[str, float] = {}
        self._lacking: set[str] = set()
        self._lock = threading.Lock()
        self._nodes_asked_s: float | None = None
        self._nodes_seen_s = 0.0
        self.nodes: Mapping[str, Node] = {}
        self.generation = 0
        self.floor = 0
        self.overtaken = ""
        self.trouble = NO_FLEET
        self._obeyed: set[str] = set()
        self.called: dict[str, float] = {}

    def __getitem__(self, node: str) -> Node:
        if node not in self.nodes:
            raise FleetError(f"node {node} is not in the fleet", "`polyfleet status` lists the nodes")
        return self.nodes[node]

    def get(self, node: str) -> Node | None:
        return self.nodes.get(node)

    def items(self) -> list[tuple[str, Node]]:
        return sorted(self.nodes.items())

    def ready(self) -> list[tuple[str, Node]]:
        return [(name, node) for name, node in self.items() if node.ready]

    def of_pool(self, pool: str) -> list[tuple[str, Node]]:
        return [(n, node) for n, node in self.ready() if node.facts is not None and node.facts.pool == pool]

    def away_reason(self, node: str) -> str:
        """Why nothing that lies on `node` can be read now, as words behind its name; "" where it can."""
        if self.trouble:
            return f"which cannot be reached: {self.trouble}"
        return away_reason(self.get(node), time.monotonic())

    def poison(self) -> list[tuple[str, dict[str, dict[str, Any]]]]:
        """(node, what of its attempts cannot be used)."""
        return [(handle.node, handle.poison) for handle in list(self._handles.values())]

    @property
    def head_silent_s(self) -> float:
        """For how long Ray has owed us its list of nodes; 0 while it owes nothing."""
        return time.monotonic() - self._nodes_asked_s if self._nodes_asked_s is not None else 0.0

    # -- what the controller commands

    def make(self, node: str, ray_id: str) -> None:
        """One at a time is made for a node: a second would slow down the first where the machine is loaded."""
        carried = ray_id in self._lacking
        limit_s = code_delivery.LIMIT_S if carried else LIMIT_S
        with self._lock:
            self._wanted[node] = ray_id
            if time.monotonic() < self._made_by_s.get((node, ray_id), 0.0):
                return
            self._made_by_s[node, ray_id] = time.monotonic() + limit_s
        make = partial(actors.make, ray_id, self._cpus.get(ray_id, 0.0), carried)
        RAY.ask(f"make the agent of {node}", make, limit_s, partial(self._made, node, ray_id))

    def _made(self, node: str, ray_id: str, actor: Any) -> None:
        """One that was dropped while it was made is not watched: it may have another name by now. The same holds for
        all of a cluster that was left.
        """
        failed = isinstance(actor, BaseException)
        with self._lock:
            self._made_by_s.pop((node, ray_id), None)
            if self._wanted.get(node) != ray_id:
                return
            if not failed:
                self._handles[node] = Handle(node, ray_id, actor)
        self._post(AgentMade(node, ray_id, first_line(actor) if failed else ""))

    def restart(self, node: str, ray_id: str, reason: str) -> None:
        """Its attempts do not notice: supervisors run apart, and the next agent reads their records."""
        handle, known = self._handles.get(node), self.nodes.get(node)
        if handle is None or handle.ray_id != ray_id:
            return
        handle.asked_s, handle.hung = None, True
        self._repaired(node, reason)
        facts = known.facts if known else None
        RAY.ask(f"end the hung agent of {node}", lambda: actors.end_hung(handle.actor, facts), LIMIT_S, _logged)

    def drop(self, node: str, ray_id: str) -> None:
        with self._lock:
            self._made_by_s.pop((node, ray_id), None)
            if self._wanted.get(node) == ray_id:
                del self._wanted[node]
            handle = self._handles.get(node)
            if handle is not None and handle.ray_id == ray_id:
                del self._handles[node]

    def rest(self, node: str, ray_id: str) -> None:
        """End the agent of a node that nothing uses."""
        self.drop(node, ray_id)
        RAY.ask(f"end the agent of {node}, which is idle", partial(actors.end_named, ray_id), LIMIT_S, _logged)

    def tell(self, node: str, method: str, *args: Any, done: Callable[[BaseException | None], None]) -> None:
        """One call, not waited for: `done` gets None or the error, in another thread."""
        handle = self._handles.get(node)
        if handle is None:
            done(FleetError(f"node {node} has no agent now", "it is asked again"))
            return
        future = getattr(handle.actor, method).remote(self.generation, *args).future()
        future.add_done_callback(lambda f: done(f.exception()))

    # -- what is looked at again and again

    def refresh(self) -> None:
        """Ask Ray for its nodes, at most once a second."""
        now = time.monotonic()
        if self._nodes_asked_s is None and now - self._nodes_seen_s > REFRESH_S:
            self._nodes_asked_s = now
            RAY.ask("list its nodes", actors.nodes, HEAD_LATE_S, self._nodes_seen)

    def _nodes_seen(self, found: Any) -> None:
        if self._nodes_asked_s is None:
            return  # they are of a cluster that was left
        self._nodes_asked_s, self._nodes_seen_s = None, time.monotonic()
        if isinstance(found, BaseException):
            log.warning("Ray's head does not tell its nodes: %s", first_line(found))
            return
        rows = [row for row in found if row.alive and row.takes_work]
        self._cpus = {row.ray_id: row.cpus for row in rows}
        self._post(NodesSeen(tuple(NodeSeen(r.ray_id, r.name, r.drain_left_s, r.cpus, r.pool) for r in rows)))

    def unwatched(self) -> list[str]:
        """Nodes whose agent is asked for nothing now."""
        now = time.monotonic()
        return [h.node for h in list(self._handles.values()) if h.asked_s is None and now >= h.rest_until_s]

    def watch(self, node: str, cursors: dict[str, int], known: dict[str, str], timeout_s: float) -> None:
        """Start a long poll of `node`; it ends in a message. A new agent says hello, then what it runs, at once."""
        handle = self._handles.get(node)
        if handle is None or handle.asked_s is not None:
            return
        handle.asked_s = asked_s = time.monotonic()
        hello = not handle.greeted
        method = handle.actor.hello if hello else handle.actor.watch
        limit_s = timeout_s if handle.listed else 0.0
        gather_s = min(timeout_s, len(self._handles) / ANSWERS_PER_S)
        arguments = () if hello else (cursors, known, limit_s, handle.clock_s, gather_s)
        future = method.remote(self.generation, *arguments).future()
        future.add_done_callback(lambda f: self._answered(handle, asked_s, f, hello))

    def _answered(self, handle: Handle, asked_s: float, future: Any, hello: bool) -> None:
        if self._handles.get(handle.node) is not handle or handle.asked_s != asked_s:
            return  # the node left, or the agent was taken for hung, meanwhile
        error, handle.asked_s = future.exception(), None
        if error is not None:
            self._failed(handle, error)
            return
        handle.hung = False
        handle.greeted, handle.listed, answer = True, not hello, future.result()
        handle.clock_s = answer["clock_s"]
        if hello:
            self._told_of(handle.node, int(answer.get("generation", 0)))
        else:
            self._obeyed.add(handle.node)
        for message in self._messages(handle, asked_s, answer, hello):
            self._post(message)

    def _told_of(self, node: str, generation: int) -> None:
        """The newest controller that a node knows."""
        if generation <= self.generation:
            return
        if node not in self._obeyed:
            self.floor = max(self.floor, generation)
        elif not self.overtaken:
            why = f"another server, started after this one, has taken over the fleet (node {node} obeys it)"
            self.overtaken = f"{why}; `polyfleet server stop` ends this one"
            log.error("%s: its generation is %d, ours %d", why, generation, self.generation)

    def _failed(self, handle: Handle, error: BaseException) -> None:
        import ray

        greeted, handle.rest_until_s, handle.greeted = handle.greeted, time.monotonic() + REST_S, False
        if isinstance(error, ray.exceptions.RayTaskError):
            log.error("node %s: %s", handle.node, error.cause)
            if isinstance(error.cause, ControllerSuperseded):
                self._told_of(handle.node, error.cause.seen)
            elif not isinstance(error.cause, Conflict):
                why = f"its agent fails: {error.cause!r}; check that it is of the server's Polyfleet version"
                self._post(AgentFailed(handle.node, handle.ray_id, why))
        if isinstance(error, ray.exceptions.RayActorError):
            gone = isinstance(error, ray.exceptions.ActorDiedError)
            if gone:  # for good: asked again while the next one is made, it would tell the same once more
                self._left(handle)
            why = self._why_none(handle, str(error)) if gone and not greeted else ""
            if greeted and not (handle.hung or self._restarts(handle.node)):
                self._repaired(handle.node, f"the agent of {handle.node} had ended and was started again")
            self._post(AgentDied(handle.node, handle.ray_id, gone, why))

    def _left(self, handle: Handle) -> None:
        with self._lock:
            if self._handles.get(handle.node) is handle:
                del self._handles[handle.node]

    def _why_none(self, handle: Handle, error: str) -> str:
        """Why an agent never began. "" where only our code is missing there: the next try brings it."""
        if code_delivery.lacks_us(error) and handle.ray_id not in self._lacking:
            self._lacking.add(handle.ray_id)
            return ""
        return f"its agent cannot start: {last_line(error)}"

    def _restarts(self, name: str) -> bool:
        """Whether all of the node was to be started again a moment ago, which is told in its own words."""
        node = self.nodes.get(name)
        return node is not None and node.restarts(time.monotonic())

    def _messages(self, handle: Handle, asked_s: float, answer: Data, hello: bool) -> list[Message]:
        """The answer as what the controller is told. A report that cannot be used concerns its attempt only."""
        if hello:
            epochs = {str(job): int(epoch) for job, epoch in answer.get("epochs", {}).items()}
            return [Heartbeat(handle.node, handle.ray_id, asked_s, _facts(answer["facts"]), epochs=epochs)]
        self._poisoned(handle, answer["poison"])
        reports: list[AttemptStatus] = []
        spoiled: list[Message] = []
        for told in answer["reports"]:
            try:
                reports.append(AttemptStatus.parse(told))
            except InvalidMessage as e:
                spoiled += _spoiled(handle.node, told, f"it {e}")
        facts = _facts(answer["facts"]) if answer["facts"] else None
        there = frozenset(answer["attempts"])
        return [*spoiled, Heartbeat(handle.node, handle.ray_id, asked_s, facts, tuple(reports), there)]

    def _poisoned(self, handle: Handle, poison: dict[str, dict[str, Any]]) -> None:
        for key in poison.keys() - handle.poison.keys():
            log.warning("attempt %s on %s wrote what cannot be used: %s", key, handle.node, poison[key]["reason"])
        handle.poison = poison

    # -- for whoever asks an agent for something

    def call(self, node: str, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """One call and its answer. Raises our own errors as they were raised there, else FleetError."""
        return actors.answer(getattr(self.actor(node), method).remote(*args), f"node {node}: {method}", timeout_s)

    def actor(self, node: str) -> Any:
        """Raises FleetError while it is being made."""
        handle = self._handles.get(self[node].name)
        self.called[node] = time.monotonic()
        if handle is None and self[node].resting:
            raise FleetError(f"node {node} is resting and has no agent", f"`polyfleet node resume {node}` wakes it")
        if handle is None:
            raise FleetError(f"node {node} has no agent yet", "it is being started: ask again")
        return handle.actor

    def dismiss(self) -> None:
        """End every agent for good. It waits for Ray."""
        for handle in list(self._handles.values()):
            actors.end_for_good(handle.actor)

    def clear(self) -> None:
        """Forget all actors: they belong to a cluster that was left."""
        with self._lock:
            self._handles.clear()
            self._wanted.clear()
            self._made_by_s.clear()
        self._nodes_asked_s, self._nodes_seen_s = None, 0.0


def _facts(plain: Data) -> NodeFacts:
    return from_plain(NodeFacts, plain)


def _spoiled(node: str, told: Any, why: str) -> list[Message]:
    try:
        job, epoch, rank = str(told["job"]), int(told["epoch"]), int(told["node_rank"])
    except (TypeError, KeyError, ValueError):
        log.error("node %s: a report that cannot be used is dropped: %s", node, why)
        return []
    cursor = told["cursor"] if isinstance(told.get("cursor"), int) else None
    why = f"what node {node} told of it cannot be used: {why}"
    return [Spoiled(job, epoch, rank, why, cursor, told.get("phase") == "ended")]


def _logged(found: Any) -> None:
    if isinstance(found, BaseException):
        log.warning("ending an agent: %s", first_line(found))
