"""Calls into Ray about nodes and agents: list nodes, start and end agents, translate errors.

Functions here, except `get_result` and `own_address`, wait for Ray's head without a time limit: call them through
RAY.call or RAY.submit.
"""

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import FleetError, PolyfleetError
from cluster.fleet.identity import agent_name, fleet_identity, namespace
from cluster.host.processes import ProcessId, kill
from cluster.paths import home
from cluster.types import HostAddress, NodeFacts
from orchestrator.runtime.agents import code_delivery

MAX_EXECS = 8
"""Same limit as in workers/node/execs.py."""
NODE_LABEL = "polyfleet.io/node"
GROUP_OF = {"stop": "ends", "remove_shared_files": "ends", "register": "watches", "poll": "watches"}
GROUP_OF |= dict.fromkeys(("exec_read", "exec_write", "exec_resize", "exec_close"), "execs")
GROUP_THREADS = {"ends": 4, "watches": 4, "execs": 2 * MAX_EXECS}
POOL_LABEL = "polyfleet.io/pool"
ROLE_LABEL = "polyfleet.io/role"
ROLES_WITHOUT_WORK = ("head", "server")


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One row of Ray's node list.

    `name`: the label we set, else host name and start of the Ray id; labels need not be unique. `takes_work`: has CPUs,
    and is neither our head nor a server's node. `drain_left_s`: None, or seconds from the listing until the drained
    node is ended; infinite if the drain has no deadline.
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


def get_result(ref: Any, call_name: str, timeout_s: float) -> Any:
    """`ray.get` that raises our errors: PolyfleetError as the remote code raised it, else FleetError."""
    import ray

    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise FleetError(
            f"{call_name} did not respond within {timeout_s:.0f} s", "`polyfleet status` shows whether the node is up"
        ) from None
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, PolyfleetError):
            raise e.cause from None
        raise FleetError(f"{call_name} failed: {e.cause!r}", "its traceback is in the server's log") from e
    except ray.exceptions.RayError as e:
        raise FleetError(
            f"{call_name} could not be reached: {first_line(e)}", "`polyfleet status` shows whether the node is up"
        ) from e


def own_address() -> HostAddress:
    """Return the machine of this process, as agents on it name theirs. Does not wait for Ray's head."""
    import ray

    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return HostAddress(socket.gethostname(), str(address))


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(text: str) -> str:
    """Return the last line of a traceback: the exception."""
    return (text.strip().splitlines() or [""])[-1].strip()


def nodes() -> list[NodeRow]:
    """List every node in Ray's table, dead ones included."""
    import ray

    rows: Any = ray.nodes()  # type: ignore[no-untyped-call]
    deadlines = draining()
    return [node_row(node, deadlines) for node in rows]


def node_row(node: Mapping[str, Any], deadlines: Mapping[str, float]) -> NodeRow:
    """Convert an entry of `ray.nodes()`. `deadlines`: the result of `draining`."""
    labels, ray_id = node.get("Labels") or {}, node["NodeID"]
    resources = node.get("Resources") or {}
    return NodeRow(
        ray_id=ray_id,
        name=labels.get(NODE_LABEL) or f"{node['NodeManagerHostname']}-{ray_id[:6]}",
        alive=bool(node["Alive"]),
        takes_work=labels.get(ROLE_LABEL) not in ROLES_WITHOUT_WORK and resources.get("CPU", 0) > 0,
        host=node["NodeManagerHostname"],
        address=node["NodeManagerAddress"],
        resources=resources,
        labels=labels,
        drain_left_s=deadlines.get(ray_id),
    )


def draining() -> dict[str, float]:
    """Seconds left of each node that is being drained, by Ray id.

    Nodes are drained by Ray's autoscaler, by `ray drain-node`, or by our node after a termination notice.
    """
    from ray._private.state import state

    deadlines: Mapping[str, int] = state.get_draining_nodes()
    return {ray_id: seconds_left(deadline_ms, time.time()) for ray_id, deadline_ms in deadlines.items()}


def seconds_left(deadline_ms: int, now_s: float) -> float:
    """Seconds until Ray's deadline (0: no deadline), a wall time of the machine that started the drain."""
    return max(0.0, deadline_ms / 1000 - now_s) if deadline_ms else float("inf")


def start_agent(ray_id: str, cpus: float = 0.0, deliver: Callable[[str], str] | None = None) -> Any:
    """Start the agent of a node, or get it by name if it is already running.

    The arguments are stored with the detached actor and outlive this process, so they are small plain values. `cpus`:
    number of CPUs that Ray offers on the node, 0 if unknown. `deliver`: called first, sends our code to a node that
    does not have it and returns its folder there. Agents of other fleets in the same Ray cluster are in other
    namespaces.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from workers.node.agent import Agent as AgentActor

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
    agent = code_delivery.delivered_class(AgentActor, deliver(ray_id)) if deliver else AgentActor
    return with_concurrency_groups(agent).options(**options).remote(fleet=identity, cpus=cpus)


def with_concurrency_groups(agent_class: type) -> Any:
    """Make `agent_class` a Ray actor class with concurrency groups.

    Stops and watches have their own threads, so they never wait behind starts that hang. So do exec commands, each of
    which blocks a thread.
    """
    import ray

    for name, group in GROUP_OF.items():
        ray.method(concurrency_group=group)(getattr(agent_class, name))
    options: dict[str, Any] = {"concurrency_groups": GROUP_THREADS}
    return ray.remote(**options)(agent_class)


def restart_actor(actor: Any) -> None:
    """Kill an actor so that Ray restarts it; takes up to 8 s if the actor hangs."""
    import ray

    ray.kill(actor, no_restart=False)


def end_actor(actor: Any) -> None:
    import ray

    ray.kill(actor, no_restart=True)


def end_agent_of_node(ray_id: str) -> None:
    """End the agent of a node permanently, also one without a handle here; do nothing if there is none."""
    import ray

    try:
        actor = ray.get_actor(agent_name(ray_id), namespace=namespace(fleet_identity(home())))
    except ValueError:
        return
    end_actor(actor)


def restart_hung_actor(actor: Any, facts: NodeFacts | None) -> None:
    """Kill a hung agent so that Ray restarts it: at once if it is on this machine, else with `restart_actor`."""
    if facts is None or not kill_local_process(facts.agent_pid, facts.agent_created):
        restart_actor(actor)


def kill_local_process(pid: int, created: str | float) -> bool:
    """Kill an agent's process, also if it is suspended (SIGSTOP).

    Return False if it is not on this machine, which `created` shows: it contains the boot id of the process's machine.
    """
    return isinstance(created, str) and created != "" and kill([ProcessId(pid, created)])
