"""The agents as the controller sees them: one detached Ray actor per live node, made when a node appears."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import FleetError
from cluster.plain import from_plain
from cluster.vocabulary import NodeFacts
from orchestrator.runtime import actors
from orchestrator.runtime.actors import first_line
from orchestrator.runtime.engine import RAY
from workers.messages import PROTOCOL

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 20.0
REFRESH_S = 1.0
LIMIT_S = 20.0
HEAD_LATE_S = 5.0
"""Ray answers within milliseconds; without an answer for so long nothing new is placed."""

HUNG_S = 8.0
"""The next agent is there 3 s later on this machine, 7 s later on another, where Ray needs 5 s to end this one."""

HELLO_HUNG_S = 90.0
REST_S = 0.5
"""After a watch that failed: an actor that restarts fails them at once."""


@dataclass
class Agent:
    """One node's agent; `actor` is None until it is made. `lost` is "" while it serves, else the reason.

    Monotonic times: `last_contact_s` of its last answer, `asked_s` of the newest watch. `strangers` are live attempts
    there that the store does not know, with how far they have told: key -> (cursor, phase).
    `poison` is of attempts whose ranks wrote what cannot be used: {key: {"count", "reason"}}.
    """

    ray_node_id: str
    actor: Any
    facts: NodeFacts | None = None
    lost: str = ""
    last_contact_s: float = field(default_factory=time.monotonic)
    watching: bool = False
    asked_s: float = 0.0
    rest_until_s: float = 0.0
    making: bool = False
    made_s: float = 0.0
    strangers: dict[str, tuple[int, str]] = field(default_factory=dict)
    poison: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return self.facts is not None and not self.lost

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.last_contact_s

    @property
    def unknown(self) -> list[str]:
        """The strangers that still run."""
        return sorted(key for key, (_, phase) in self.strangers.items() if phase != "ended")


class Agents:
    """By node name. Nothing here waits, but `call`: answers go to `post` as messages, in any thread.

    | message                                       | is handled by |
    |-----------------------------------------------|---------------|
    | ("nodes", generation, Ray's nodes or error)   | `nodes_seen`  |
    | ("made", generation, node, agent, its actor)  | `made`        |
    | ("watched", node, report or error)            | the caller    |

    `generation` grows with `clear`: what was asked of another cluster does not count. `repaired` gets a node and what
    was done for it.
    """

    def __init__(self, post: Callable[[tuple[Any, ...]], None], repaired: Callable[[str, str], None] = lambda *_: None):
        self._post, self._repaired = post, repaired
        self._by_node: dict[str, Agent] = {}
        self._generation = 0
        self._nodes_asked_s: float | None = None
        self._nodes_seen_s = 0.0

    def __getitem__(self, node: str) -> Agent:
        if node not in self._by_node:
            raise FleetError(f"node {node} is not in the fleet", "`polyfleet status` lists the nodes")
        return self._by_node[node]

    def get(self, node: str) -> Agent | None:
        return self._by_node.get(node)

    def items(self) -> list[tuple[str, Agent]]:
        return sorted(self._by_node.items())

    def ready(self) -> list[tuple[str, Agent]]:
        return [(name, agent) for name, agent in self.items() if agent.ready]

    def of_pool(self, pool: str) -> list[tuple[str, Agent]]:
        return [(n, a) for n, a in self.ready() if a.facts is not None and a.facts.pool == pool]

    @property
    def head_silent_s(self) -> float:
        """For how long Ray has owed us its list of nodes; 0 while it owes nothing."""
        return time.monotonic() - self._nodes_asked_s if self._nodes_asked_s is not None else 0.0

    def dismiss(self) -> None:
        """End every agent for good. It waits for Ray."""
        for agent in self._by_node.values():
            if agent.actor is not None:
                actors.end_for_good(agent.actor)

    def clear(self) -> None:
        """Forget all nodes: they belonged to another cluster."""
        self._generation += 1
        self._nodes_asked_s, self._nodes_seen_s = None, 0.0
        self._by_node.clear()

    def refresh(self) -> None:
        """Ask Ray for its nodes, at most once a second, and look after agents that do not answer."""
        now, generation = time.monotonic(), self._generation
        if self._nodes_asked_s is None and now - self._nodes_seen_s > REFRESH_S:
            self._nodes_asked_s = now
            RAY.ask("list its nodes", actors.nodes, HEAD_LATE_S, lambda found: self._post(("nodes", generation, found)))
        if self.head_silent_s > HEAD_LATE_S:
            return
        for node, agent in self.items():
            if agent.lost:
                continue
            if agent.actor is None and not agent.making and now - agent.made_s > REFRESH_S:
                self._make(node, agent)
            elif agent.actor is not None and _hangs(agent, now):
                self._restart(node, agent, now)

    def _restart(self, node: str, agent: Agent, now: float) -> None:
        """Its attempts do not notice: supervisors run apart, and the next agent reads their records."""
        silent_s, agent.asked_s = now - agent.asked_s, now
        self._repaired(node, f"the agent of {node} did not answer for {silent_s:.0f} s and was started again")
        RAY.ask(f"end the hung agent of {node}", lambda: actors.end_hung(agent.actor, agent.facts), LIMIT_S, _logged)

    def nodes_seen(self, generation: int, found: Any) -> None:
        """Compare with Ray's list of nodes: make agents for new ones, mark those gone as lost."""
        if generation != self._generation:
            return
        self._nodes_asked_s, self._nodes_seen_s = None, time.monotonic()
        if isinstance(found, BaseException):
            log.warning("Ray's head does not tell its nodes: %s", first_line(found))
            return
        alive = {row.ray_id: row for row in found if row.alive and row.takes_work}
        for agent in self._by_node.values():
            if agent.ray_node_id not in alive and not agent.lost:
                agent.lost = "Ray reports the node dead"
        known = {a.ray_node_id for a in self._by_node.values()}
        for node_id, row in alive.items():
            if node_id not in known:
                self._by_node[row.name] = Agent(node_id, None)
                self._make(row.name, self._by_node[row.name])

    def _make(self, node: str, agent: Agent) -> None:
        generation, agent.actor, agent.making, agent.made_s = self._generation, None, True, time.monotonic()
        RAY.ask(
            f"make the agent of {node}",
            lambda: actors.make(agent.ray_node_id),
            LIMIT_S,
            lambda actor: self._post(("made", generation, node, agent, actor)),
        )

    def made(self, generation: int, node: str, agent: Agent, actor: Any) -> None:
        if generation != self._generation or self._by_node.get(node) is not agent:
            return
        agent.making = False
        if isinstance(actor, BaseException):
            log.warning("the agent of %s could not be made and is tried again: %s", node, first_line(actor))
        else:
            agent.actor = actor

    def watch(self, node: str, cursors: dict[str, int], known: dict[str, str], timeout_s: float) -> None:
        """Start a long poll of `node` unless one is under way; it ends in a message. A new node says hello first."""
        agent, now = self._by_node[node], time.monotonic()
        if agent.watching or agent.lost or agent.actor is None or now < agent.rest_until_s:
            return
        agent.watching, agent.asked_s = True, now
        new = agent.facts is None
        ref = agent.actor.hello.remote() if new else agent.actor.watch.remote(cursors, known, timeout_s)
        ref.future().add_done_callback(lambda f: self._ended(node, agent, f, new))

    def _ended(self, node: str, agent: Agent, future: Any, new: bool) -> None:
        agent.watching = False
        if self._by_node.get(node) is not agent:
            return
        if (error := future.exception()) is not None:
            agent.rest_until_s = time.monotonic() + REST_S
            self._post(("watched", node, error))
            return
        agent.last_contact_s = time.monotonic()
        answer = future.result()
        self._post(("watched", node, {"facts": answer, "reports": [], "attempts": None} if new else answer))

    def heard(self, node: str, facts: dict[str, Any] | None) -> None:
        """Keep what an agent says of its node. Raises FleetError for an agent of another protocol."""
        if facts is None:
            return
        agent = self._by_node[node]
        agent.facts = from_plain(NodeFacts, facts)
        if agent.facts.protocol != PROTOCOL:
            agent.lost = (
                f"speaks protocol {agent.facts.protocol}, the server {PROTOCOL}: install the same Polyfleet version"
            )

    def failed(self, node: str, error: BaseException) -> None:
        """A watch ended in an error: an actor that restarts is asked again, a dead one on a live node is made anew."""
        import ray

        agent = self._by_node.get(node)
        if agent is not None and isinstance(error, ray.exceptions.ActorDiedError) and not agent.lost:
            self._repaired(node, f"the agent of {node} had ended and was started again")
            self._make(node, agent)

    def call(self, node: str, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """One call and its answer. Raises our own errors as they were raised there, else FleetError."""
        return actors.answer(getattr(self.actor(node), method).remote(*args), f"node {node}: {method}", timeout_s)

    def actor(self, node: str) -> Any:
        """Raises FleetError while it is being made."""
        actor = self[node].actor
        if actor is None:
            raise FleetError(f"node {node} has no agent yet", "it is being started: ask again")
        return actor


def _hangs(agent: Agent, now: float) -> bool:
    """A watch takes two seconds; a first greeting may wait for tools of vendors, and for the process to start."""
    limit_s = HUNG_S if agent.facts else HELLO_HUNG_S
    return agent.watching and now - agent.asked_s > limit_s


def _logged(found: Any) -> None:
    if isinstance(found, BaseException):
        log.warning("ending a hung agent: %s", first_line(found))
