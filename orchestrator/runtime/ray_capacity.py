"""Whether Ray has room on its nodes for what is to be reserved, and who holds it where it has not."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import FleetError
from cluster.identity import agent_name, fleet_identity, namespace
from cluster.paths import home

PLACES = 4
SMALLEST = 10.0**-PLACES
"""Ray counts in ten-thousandths: each amount is rounded to that."""

Resources = dict[str, float]


class NoRoom(FleetError):
    """Ray did not reserve `wanted` (Ray resources by node). `short`: the nodes that do not have it free; `unheld`:
    those of them where nobody whom Ray knows holds it.
    """

    def __init__(self, wanted: Mapping[str, Resources], short: Sequence[str], unheld: Sequence[str]):
        super().__init__(_said(wanted, short, unheld))
        self.args = (dict(wanted), tuple(short), tuple(unheld))
        self.wanted, self.short, self.unheld = wanted, tuple(short), tuple(unheld)

    def named(self, names: Mapping[str, str]) -> "NoRoom":
        """With names for Ray ids."""
        short, unheld = ([names[node] for node in nodes] for nodes in (self.short, self.unheld))
        return NoRoom({names[node]: wanted for node, wanted in self.wanted.items()}, short, unheld)


@dataclass(frozen=True, slots=True)
class Held:
    """What Ray tells of its nodes, by Ray id: what they have, what is free, what placement groups hold there, and
    which may run what others started (`shared`).
    """

    has: Mapping[str, Resources]
    free: Mapping[str, Resources]
    held: Mapping[str, Resources]
    shared: frozenset[str] = frozenset()


def fits(bundles: Sequence[Resources], ray_node_ids: Sequence[str], free: Mapping[str, Resources]) -> bool:
    """Whether every node has room for the sum of its bundles. `free` is by node; a dead one is not in it."""
    return all(_covers(free.get(node, {}), wanted) for node, wanted in _sums(bundles, ray_node_ids).items())


def short(bundles: Sequence[Resources], ray_node_ids: Sequence[str]) -> NoRoom:
    """The error that says which nodes have no room, and why. Asks Ray."""
    return explained(bundles, ray_node_ids, _ask())


def explained(bundles: Sequence[Resources], ray_node_ids: Sequence[str], ray: Held) -> NoRoom:
    """As `short`, from what Ray has told."""
    wanted = _sums(bundles, ray_node_ids)
    lacking = [node for node in wanted if not _covers(ray.free.get(node, {}), wanted[node])]
    unheld = [node for node in lacking if _is_unheld(node, wanted[node], ray)]
    return NoRoom(wanted, lacking, unheld)


def _said(wanted: Mapping[str, Resources], lacking: Sequence[str], unheld: Sequence[str]) -> str:
    if not lacking:
        return f"Ray reports {_amounts(wanted, wanted)} as free, but did not reserve them in time"
    needed = f"Ray does not report {_amounts(wanted, lacking)} as free"
    if len(unheld) == len(lacking):
        return f"{needed}: nothing that Ray lists uses them, so Ray missed that they were given back"
    return f"{needed}: another program of this Ray cluster uses them, or Ray missed that they were given back"


def _amounts(wanted: Mapping[str, Resources], nodes: Iterable[str]) -> str:
    """`1 CPU and 2 GPU of node a`"""
    return ", ".join(
        f"{' and '.join(f'{amount:g} {name}' for name, amount in wanted[node].items())} of node {node}"
        for node in nodes
    )


def _is_unheld(node: str, wanted: Resources, ray: Held) -> bool:
    if node not in ray.has or node not in ray.free or node in ray.shared:
        return False
    held = ray.held.get(node, {})
    left = {resource: amount - held.get(resource, 0.0) for resource, amount in ray.has[node].items()}
    return _covers(left, wanted)


def _sums(bundles: Sequence[Resources], ray_node_ids: Sequence[str]) -> dict[str, Resources]:
    return _by_node(zip(ray_node_ids, bundles, strict=True))


def _by_node(parts: Iterable[tuple[str, Resources]]) -> dict[str, Resources]:
    sums: dict[str, Resources] = {}
    for node, bundle in parts:
        so_far = sums.setdefault(node, {})
        for resource, amount in bundle.items():
            so_far[resource] = so_far.get(resource, 0.0) + round(amount, PLACES)
    return sums


def _covers(free: Mapping[str, float], wanted: Resources) -> bool:
    return all(amount <= free.get(resource, 0.0) + SMALLEST for resource, amount in wanted.items())


def withholds(ray_id: str) -> bool:
    """Whether Ray reserves something there for nobody: no group lies there and nobody else runs there, yet not all is
    free. Asks Ray.
    """
    return is_withheld(ray_id, _ask())


def is_withheld(ray_id: str, ray: Held) -> bool:
    """As `withholds`, from what Ray has told."""
    known = ray_id in ray.has and ray_id in ray.free
    if not known or ray_id in ray.shared or ray.held.get(ray_id):
        return False
    counted = {resource: amount for resource, amount in ray.has[ray_id].items() if "memory" not in resource}
    return not _covers(ray.free[ray_id], counted)


def _ask() -> Held:
    import ray
    from ray._private.state import available_resources_per_node
    from ray.util.placement_group import placement_group_table

    rows: Any = ray.nodes()  # type: ignore[no-untyped-call]
    has = {row["NodeID"]: dict(row["Resources"]) for row in rows if row["Alive"]}
    return Held(
        has,
        available_resources_per_node(),  # type: ignore[no-untyped-call]
        held(placement_group_table().values()),
        frozenset(has) if _has_other_drivers() else _shared(),
    )


def held(groups: Iterable[Mapping[str, Any]]) -> dict[str, Resources]:
    """By node, what placement groups hold there. `groups`: rows of Ray's table."""
    standing = [row for row in groups if row["state"] != "REMOVED"]
    return _by_node(
        (node, row["bundles"][n]) for row in standing for n, node in row["bundles_to_node_id"].items() if node
    )


def _has_other_drivers() -> bool:
    """Their tasks may run anywhere."""
    import ray
    from ray._private.state import state

    own = ray.get_runtime_context().get_job_id()
    return any(row["JobID"] != own and not row["IsDead"] for row in state.job_table())  # type: ignore[no-untyped-call]


def _shared() -> frozenset[str]:
    """Nodes with an actor that is not our agent there: it may hold resources without a group."""
    from ray._private.state import state
    from ray.util import list_named_actors

    actors: Any = state.actor_table(None, None, None)
    named: Any = list_named_actors(all_namespaces=True)
    ours = namespace(fleet_identity(home()))
    foreign = {row["name"] for row in named if row["namespace"] != ours}
    return shared((row for row in actors.values() if row["State"] != "DEAD"), foreign)


def shared(actors: Iterable[Mapping[str, Any]], foreign: Collection[str]) -> frozenset[str]:
    """Nodes with a living actor that is not our agent there. `foreign`: names that actors bear in other namespaces:
    agents of other fleets are called like ours.
    """
    rows = [(row["Address"]["NodeID"], row["Name"]) for row in actors]
    return frozenset(node for node, name in rows if name != agent_name(node) or name in foreign)
