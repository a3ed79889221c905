"""Ray's side of an agent: nodes as Ray lists them, the detached actor on each, and calls whose errors are ours.

All but `answer` wait for Ray's head, without a limit of their own: have them made by RAY.ask or RAY.run.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import FleetError, PolyfleetError
from cluster.identity import agent_name, fleet_identity, namespace
from cluster.paths import home
from cluster.processes import ProcessId, kill
from cluster.types import NodeFacts
from orchestrator.runtime import code_delivery

MOST_EXECS = 8
"""As workers/execs.py has it."""
NODE_LABEL = "polyfleet.io/node"
GROUP_OF = {"stop": "ends", "forget": "ends", "hello": "watches", "watch": "watches"}
GROUP_OF |= dict.fromkeys(("exec_read", "exec_write", "exec_resize", "exec_close"), "execs")
GROUP_THREADS = {"ends": 4, "watches": 4, "execs": 2 * MOST_EXECS}
POOL_LABEL = "polyfleet.io/pool"
ROLE_LABEL = "polyfleet.io/role"
WITHOUT_WORK = ("head", "server")


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One of Ray's nodes. `name`: the label we gave it, else its host and the start of its id; two nodes may have one
    label. `takes_work`: it is no head of ours, nor the node of a server, and has CPUs. `drain_left_s`: None, or after
    how many seconds whoever drains it will end it, counted when it was listed; infinite where nobody said.
    """

    ray_id: str
    name: str
    alive: bool
    takes_work: bool
    host: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    drain_left_s: float | None = None

    @property
    def cpus(self) -> float:
        return self.resources.get("CPU", 0.0)

    @property
    def pool(self) -> str:
        return self.labels.get(POOL_LABEL, "")

    @property
    def draining(self) -> bool:
        return self.drain_left_s is not None


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
        raise FleetError(
            f"{what} could not be reached: {first_line(e)}", "`polyfleet status` shows whether the node lives"
        ) from e


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(text: str) -> str:
    """Of a traceback, what was raised."""
    return (text.strip().splitlines() or [""])[-1].strip()


def nodes() -> list[NodeRow]:
    """Every node that Ray knows, those that are gone too."""
    import ray

    found: Any = ray.nodes()  # type: ignore[no-untyped-call]
    leaving = draining()
    return [row(node, leaving) for node in found]


def row(node: Mapping[str, Any], leaving: Mapping[str, float]) -> NodeRow:
    """Of one of `ray.nodes()` and what `draining` returned."""
    labels, ray_id = node.get("Labels") or {}, node["NodeID"]
    resources = node.get("Resources") or {}
    return NodeRow(
        ray_id=ray_id,
        name=labels.get(NODE_LABEL) or f"{node['NodeManagerHostname']}-{ray_id[:6]}",
        alive=bool(node["Alive"]),
        takes_work=labels.get(ROLE_LABEL) not in WITHOUT_WORK and resources.get("CPU", 0) > 0,
        host=node["NodeManagerHostname"],
        address=node["NodeManagerAddress"],
        resources=resources,
        labels=labels,
        drain_left_s=leaving.get(ray_id),
    )


def draining() -> dict[str, float]:
    """Seconds left, by Ray's id, of each node that is being drained: by Ray's autoscaler, `ray drain-node`, or a node
    of ours that was told to end.
    """
    from ray._private.state import state

    found: Mapping[str, int] = state.get_draining_nodes()
    return {ray_id: seconds_left(deadline_ms, time.time()) for ray_id, deadline_ms in found.items()}


def seconds_left(deadline_ms: int, now_s: float) -> float:
    """Ray's deadline is by the clock of whoever drains; 0 says that there is none."""
    return max(0.0, deadline_ms / 1000 - now_s) if deadline_ms else float("inf")


def make(ray_id: str, cpus: float = 0.0, carried: bool = False) -> Any:
    """The agent of that node, found by its name when it already lives. Small plain arguments only: they outlive us.
    `cpus`: how many Ray gives out there, 0 where that is not known. `carried`: our code is brought there first.

    Agents of other fleets in the same Ray cluster are in other namespaces.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from workers.agent import Agent as AgentActor

    identity = fleet_identity(home())
    options: dict[str, Any] = {
        "name": agent_name(ray_id),
        "namespace": namespace(identity),
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        "max_concurrency": 16,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray_id, soft=False),
    }
    agent = code_delivery.carried(AgentActor, code_delivery.bring(ray_id)) if carried else AgentActor
    return grouped(agent).options(**options).remote(fleet=identity, cpus=cpus)


def grouped(agent: type) -> Any:
    """The actor class. Stops and watches have threads of their own: they never wait behind starts that hang. So do
    commands beside jobs, each of which keeps one waiting.
    """
    import ray

    for name, group in GROUP_OF.items():
        ray.method(concurrency_group=group)(getattr(agent, name))
    options: dict[str, Any] = {"concurrency_groups": GROUP_THREADS}
    return ray.remote(**options)(agent)


def end(actor: Any) -> None:
    """For Ray to start it again: within 8 s when it hangs."""
    import ray

    ray.kill(actor, no_restart=False)


def end_for_good(actor: Any) -> None:
    import ray

    ray.kill(actor, no_restart=True)


def end_named(ray_id: str) -> None:
    """The agent of that node for good, whether we know it or not; nothing where it has none."""
    import ray

    try:
        actor = ray.get_actor(agent_name(ray_id), namespace=namespace(fleet_identity(home())))
    except ValueError:
        return
    end_for_good(actor)


def end_hung(actor: Any, facts: NodeFacts | None) -> None:
    """For Ray to start it again: at once where its process is one of this machine, else as `end`."""
    if facts is None or not kill_here(facts.agent_pid, facts.agent_created):
        end(actor)


def kill_here(pid: int, created: str | float) -> bool:
    """Kill an agent's process, also one that is stopped. False where it is none of this machine: `created`, which names
    the machine's boot, says so.
    """
    return isinstance(created, str) and created != "" and kill([ProcessId(pid, created)])
