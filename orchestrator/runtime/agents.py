"""The agents as the controller sees them: one detached Ray actor per live node, made when a node appears."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.connect import NAMESPACE
from cluster.errors import FleetError, PolyfleetError
from cluster.plain import from_plain
from cluster.vocabulary import NodeFacts
from workers.messages import PROTOCOL

CALL_TIMEOUT_S = 20.0
NODE_LABEL = "polyfleet.io/node"


@dataclass
class Agent:
    """One node's agent. `lost` is "" while it serves, else the reason; `asked_s` (monotonic) of the newest watch.
    `poison` is of attempts whose ranks wrote what cannot be used: {key: {"count", "reason"}}.
    """

    ray_node_id: str
    actor: Any
    facts: NodeFacts | None = None
    lost: str = ""
    last_contact_s: float = field(default_factory=time.monotonic)
    watching: bool = False
    asked_s: float = 0.0
    poison: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return self.facts is not None and not self.lost


class Agents:
    """By node name. `arrived` is called in any thread with (node, report or exception) when a watch ends."""

    def __init__(self, arrived: Callable[[str, Any], None]):
        self._arrived = arrived
        self._by_node: dict[str, Agent] = {}

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

    def dismiss(self) -> None:
        """End every agent for good."""
        import ray

        for agent in self._by_node.values():
            ray.kill(agent.actor, no_restart=True)
        self.clear()

    def clear(self) -> None:
        """Forget all nodes: they belonged to another cluster."""
        self._by_node.clear()

    def refresh(self) -> None:
        """Compare with Ray's list of nodes: make agents for new ones, mark those gone as lost."""
        import ray

        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        alive = {n["NodeID"]: n for n in nodes if n["Alive"] and _takes_work(n)}
        for agent in self._by_node.values():
            if agent.ray_node_id not in alive and not agent.lost:
                agent.lost = "Ray reports the node dead"
        known = {a.ray_node_id for a in self._by_node.values()}
        for node_id, node in alive.items():
            if node_id not in known:
                self._by_node[node_name(node)] = Agent(node_id, _make_actor(node_id))

    def watch(self, node: str, cursors: dict[str, int], known: dict[str, str], timeout_s: float) -> None:
        """Start a long poll of `node` unless one is under way; it ends in `arrived`. A new node says hello first."""
        agent = self._by_node[node]
        if agent.watching or agent.lost:
            return
        agent.watching, agent.asked_s = True, time.monotonic()
        new = agent.facts is None
        ref = agent.actor.hello.remote() if new else agent.actor.watch.remote(cursors, known, timeout_s)
        ref.future().add_done_callback(lambda f: self._ended(node, agent, f, new))

    def _ended(self, node: str, agent: Agent, future: Any, new: bool) -> None:
        agent.watching = False
        if (error := future.exception()) is not None:
            self._arrived(node, error)
            return
        agent.last_contact_s = time.monotonic()
        answer = future.result()
        self._arrived(node, {"facts": answer, "reports": [], "attempts": None} if new else answer)

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

        agent = self._by_node[node]
        if isinstance(error, ray.exceptions.ActorDiedError) and not agent.lost:
            agent.actor = _make_actor(agent.ray_node_id)

    def call(self, node: str, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """One call and its answer. Raises our own errors as they were raised there, else FleetError."""
        return answer(getattr(self[node].actor, method).remote(*args), f"node {node}: {method}", timeout_s)


def answer(ref: Any, what: str, timeout_s: float) -> Any:
    """`ray.get` whose errors are ours."""
    import ray

    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise FleetError(
            f"{what} gave no answer within {timeout_s:.0f} s", "`polyfleet status` shows whether the node lives"
        ) from None
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, PolyfleetError):
            raise e.cause from None
        raise FleetError(f"{what} failed: {e.cause!r}", "its traceback is in the server's log") from e
    except ray.exceptions.RayError as e:
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise FleetError(
            f"{what} could not be reached: {first}", "`polyfleet status` shows whether the node lives"
        ) from e


def node_name(node: dict[str, Any]) -> str:
    """Our name for one of `ray.nodes()`: the label we gave it, else its host and the start of its id."""
    labels = node.get("Labels", {})
    return labels.get(NODE_LABEL) or f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"


def _takes_work(node: dict[str, Any]) -> bool:
    is_head = node.get("Labels", {}).get("polyfleet.io/role") == "head"
    return not is_head and bool(node["Resources"].get("CPU", 0) > 0)


def _make_actor(node_id: str) -> Any:
    """The agent of that node, found by its name when it already lives. Small plain arguments only: they outlive us."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from workers.agent import Agent as AgentActor

    options: dict[str, Any] = {
        "name": f"agent-{node_id}",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        "max_concurrency": 16,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    return ray.remote(AgentActor).options(**options).remote()
