"""Check whether Ray's nodes have free resources for a reservation, and otherwise what uses them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import FleetError
from cluster.fleet.identity import agent_name, fleet_identity, namespace
from cluster.paths import home

DECIMALS = 4
RESOLUTION = 10.0**-DECIMALS
"""Ray counts resources in units of 0.0001 and rounds each amount to that."""

Resources = dict[str, float]


class NoCapacity(FleetError):
    """Ray did not reserve `requested` (Ray resources by node).

    `lacking`: nodes where they are not free; `stuck`: those of them where nothing that Ray lists uses them.
    """

    def __init__(self, requested: Mapping[str, Resources], lacking: Sequence[str], stuck: Sequence[str]):
        super().__init__(_message(requested, lacking, stuck))
        self.args = (dict(requested), tuple(lacking), tuple(stuck))
        self.requested, self.lacking, self.stuck = requested, tuple(lacking), tuple(stuck)

    def with_names(self, names: Mapping[str, str]) -> "NoCapacity":
        """The same error with node names instead of Ray ids."""
        lacking, stuck = ([names[node] for node in nodes] for nodes in (self.lacking, self.stuck))
        return NoCapacity({names[node]: requested for node, requested in self.requested.items()}, lacking, stuck)


@dataclass(frozen=True, slots=True)
class RayResources:
    """Ray's resources, by Ray id of the node.

    `has`: total; `free`; `held`: reserved by placement groups. `shared`: nodes that may run work of other programs.
    """

    has: Mapping[str, Resources]
    free: Mapping[str, Resources]
    held: Mapping[str, Resources]
    shared: frozenset[str] = frozenset()


def fits(bundles: Sequence[Resources], ray_node_ids: Sequence[str], free: Mapping[str, Resources]) -> bool:
    """Check that every node has the sum of its bundles free. `free` is by node, without dead ones."""
    return all(_covers(free.get(node, {}), requested) for node, requested in _sums(bundles, ray_node_ids).items())


def no_capacity(bundles: Sequence[Resources], ray_node_ids: Sequence[str]) -> NoCapacity:
    """Make the error that names the nodes without free resources, and the reason. Calls Ray."""
    return explain_shortage(bundles, ray_node_ids, _read_resources())


def explain_shortage(bundles: Sequence[Resources], ray_node_ids: Sequence[str], ray: RayResources) -> NoCapacity:
    """Same as `no_capacity`, but from resources that were already read."""
    requested = _sums(bundles, ray_node_ids)
    lacking = [node for node in requested if not _covers(ray.free.get(node, {}), requested[node])]
    stuck = [node for node in lacking if _is_unused(node, requested[node], ray)]
    return NoCapacity(requested, lacking, stuck)


def _message(requested: Mapping[str, Resources], lacking: Sequence[str], stuck: Sequence[str]) -> str:
    if not lacking:
        return f"Ray reports {_amounts(requested, requested)} as free, but did not reserve them in time"
    needed = f"Ray does not report {_amounts(requested, lacking)} as free"
    if len(stuck) == len(lacking):
        return f"{needed}: nothing that Ray lists uses them, so Ray missed that they were released"
    return f"{needed}: another program of this Ray cluster uses them, or Ray missed that they were released"


def _amounts(requested: Mapping[str, Resources], nodes: Iterable[str]) -> str:
    """`1 CPU and 2 GPU of node a`"""
    return ", ".join(
        f"{' and '.join(f'{amount:g} {name}' for name, amount in requested[node].items())} of node {node}"
        for node in nodes
    )


def _is_unused(node: str, requested: Resources, ray: RayResources) -> bool:
    if node not in ray.has or node not in ray.free or node in ray.shared:
        return False
    held = ray.held.get(node, {})
    remaining = {resource: amount - held.get(resource, 0.0) for resource, amount in ray.has[node].items()}
    return _covers(remaining, requested)


def _sums(bundles: Sequence[Resources], ray_node_ids: Sequence[str]) -> dict[str, Resources]:
    return _by_node(zip(ray_node_ids, bundles, strict=True))


def _by_node(parts: Iterable[tuple[str, Resources]]) -> dict[str, Resources]:
    sums: dict[str, Resources] = {}
    for node, bundle in parts:
        node_sums = sums.setdefault(node, {})
        for resource, amount in bundle.items():
            node_sums[resource] = node_sums.get(resource, 0.0) + round(amount, DECIMALS)
    return sums


def _covers(free: Mapping[str, float], requested: Resources) -> bool:
    return all(amount <= free.get(resource, 0.0) + RESOLUTION for resource, amount in requested.items())


def has_stuck_resources(ray_id: str) -> bool:
    """Check whether Ray keeps resources of a node reserved for nothing. Calls Ray.

    That is: no placement group and no other program is on the node, yet not all of it is free.
    """
    return is_stuck(ray_id, _read_resources())


def is_stuck(ray_id: str, ray: RayResources) -> bool:
    """Same as `has_stuck_resources`, but from resources that were already read."""
    is_listed = ray_id in ray.has and ray_id in ray.free
    if not is_listed or ray_id in ray.shared or ray.held.get(ray_id):
        return False
    counted = {resource: amount for resource, amount in ray.has[ray_id].items() if "memory" not in resource}
    return not _covers(ray.free[ray_id], counted)


def _read_resources() -> RayResources:
    import ray
    from ray._private.state import available_resources_per_node
    from ray.util.placement_group import placement_group_table

    rows: Any = ray.nodes()  # type: ignore[no-untyped-call]
    has = {row["NodeID"]: dict(row["Resources"]) for row in rows if row["Alive"]}
    return RayResources(
        has,
        available_resources_per_node(),  # type: ignore[no-untyped-call]
        reserved_by_node(placement_group_table().values()),
        frozenset(has) if _has_other_drivers() else _shared(),
    )


def reserved_by_node(groups: Iterable[Mapping[str, Any]]) -> dict[str, Resources]:
    """Resources that placement groups hold, by node. `groups`: rows of Ray's table."""
    existing = [row for row in groups if row["state"] != "REMOVED"]
    return _by_node(
        (node, row["bundles"][n]) for row in existing for n, node in row["bundles_to_node_id"].items() if node
    )


def _has_other_drivers() -> bool:
    """Whether other programs use this cluster: their tasks may run on any node."""
    import ray
    from ray._private.state import state

    own = ray.get_runtime_context().get_job_id()
    return any(row["JobID"] != own and not row["IsDead"] for row in state.job_table())  # type: ignore[no-untyped-call]


def _shared() -> frozenset[str]:
    """Nodes with an actor other than our agent: it may use resources without a placement group."""
    from ray._private.state import state
    from ray.util import list_named_actors

    actors: Any = state.actor_table(None, None, None)
    named: Any = list_named_actors(all_namespaces=True)
    our_namespace = namespace(fleet_identity(home()))
    foreign = {row["name"] for row in named if row["namespace"] != our_namespace}
    return shared((row for row in actors.values() if row["State"] != "DEAD"), foreign)


def shared(actors: Iterable[Mapping[str, Any]], foreign: Collection[str]) -> frozenset[str]:
    """Nodes with a running actor other than our agent.

    `foreign`: names of actors in other namespaces, because agents of other fleets have the same names as ours.
    """
    rows = [(row["Address"]["NodeID"], row["Name"]) for row in actors]
    return frozenset(node for node, name in rows if name != agent_name(node) or name in foreign)
