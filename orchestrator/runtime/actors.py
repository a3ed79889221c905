"""Ray's side of an agent: nodes as Ray lists them, the detached actor on each, and calls whose errors are ours."""

from typing import Any

from cluster.connect import NAMESPACE
from cluster.errors import FleetError, PolyfleetError

NODE_LABEL = "polyfleet.io/node"
GROUP_OF = {"stop": "ends", "forget": "ends", "hello": "watches", "watch": "watches"}
GROUP_THREADS = 4


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


def node_name(node: dict[str, Any]) -> str:
    """Our name for one of `ray.nodes()`: the label we gave it, else its host and the start of its id."""
    labels = node.get("Labels", {})
    return labels.get(NODE_LABEL) or f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"


def takes_work(node: dict[str, Any]) -> bool:
    is_head = node.get("Labels", {}).get("polyfleet.io/role") == "head"
    return not is_head and bool(node["Resources"].get("CPU", 0) > 0)


def nodes() -> Any:
    import ray

    return ray.nodes()  # type: ignore[no-untyped-call]


def make(node_id: str) -> Any:
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
    return grouped(AgentActor).options(**options).remote()


def grouped(agent: type) -> Any:
    """The actor class. Stops and watches have threads of their own: they never wait behind starts that hang."""
    import ray

    for name, group in GROUP_OF.items():
        ray.method(concurrency_group=group)(getattr(agent, name))
    return ray.remote(concurrency_groups=dict.fromkeys(GROUP_OF.values(), GROUP_THREADS))(agent)


def end(actor: Any) -> None:
    """For Ray to start it again."""
    import ray

    ray.kill(actor, no_restart=False)
