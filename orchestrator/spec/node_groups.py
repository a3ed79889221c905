"""Node groups for the planner: pools whose nodes an autoscaler starts, from the fleet file that its file comes from."""

from typing import Any

from cluster import catalogue
from cluster.errors import PolyfleetError
from cluster.fleet.fleet_spec import FleetSpec, parse_fleet
from cluster.render.shapes import Shape, environment_name, shapes
from orchestrator.core.controller.scaling import NodeGroup

REQUIRED_FIELDS = ("cpus",)
START_TIMEOUT_S = 600
KEEP_IDLE_S = 300


def groups_of_fleet(fleet: FleetSpec | None) -> tuple[NodeGroup, ...]:
    """Groups of the fleet's pools that grow. Raises SpecError if a pool lacks a field that a group needs."""
    pools = {name: pool for name, pool in fleet.pools.items() if pool.max_nodes is not None} if fleet else {}
    if fleet is None or not pools:
        return ()
    growing = fleet.model_copy(update={"pools": pools})
    return tuple(_group(shape) for shape in shapes(growing, REQUIRED_FIELDS) if shape.grows)


def groups_of_pools(pools: dict[str, dict[str, Any]]) -> tuple[NodeGroup, ...]:
    """Groups of the pools in a fleet's record."""
    growing = {name: pool for name, pool in pools.items() if pool.get("max_nodes") is not None}
    return groups_of_fleet(parse_fleet({"pools": growing})) if growing else ()


class NodeGroupCache:
    """Cache of the groups of a record that is read repeatedly. Pools that have become invalid no longer grow."""

    def __init__(self) -> None:
        self._pools: dict[str, dict[str, Any]] = {}
        self._groups: tuple[NodeGroup, ...] = ()

    def groups(self, pools: dict[str, dict[str, Any]]) -> tuple[NodeGroup, ...]:
        if pools != self._pools:
            self._pools = pools
            try:
                self._groups = groups_of_pools(pools)
            except PolyfleetError:
                self._groups = ()
        return self._groups


def _group(shape: Shape) -> NodeGroup:
    pool = shape.spec
    devices = shape.devices or pool.devices
    return NodeGroup(
        pool=shape.pool,
        environment=environment_name(pool),
        backend=pool.backend,
        kind=_kind(shape),
        devices=devices,
        resources={name: float(count) for name, count in shape.resources().items()},
        max_nodes=shape.max_nodes,
        hosts=shape.hosts,
        memory_bytes=_memory_bytes(shape, devices),
        price_per_hour=pool.price_per_hour,
        emulated=pool.emulated,
        min_nodes=shape.min_nodes,
        start_timeout_s=float(pool.start_timeout_s or START_TIMEOUT_S),
        keep_idle_s=float(pool.keep_idle_s or KEEP_IDLE_S),
    )


def _kind(shape: Shape) -> str:
    """Kind of device as discovery will name it."""
    if shape.spec.emulated:
        return f"{shape.spec.backend}:emulated"
    engine = shape.spec.env.get("POLYFLEET_CPU_ENGINE", "")
    return f"{shape.kind}:{engine}" if engine and not shape.devices else shape.kind


def _memory_bytes(shape: Shape, devices: int) -> int:
    """Memory of one device: a CPU's share of the node's, or an accelerator's in the catalogue (0: unknown)."""
    if not shape.devices:
        return shape.memory_bytes // devices
    row = catalogue.model(shape.kind)
    if row is None:
        return 0
    size = row.memory_gib * 2**30 if row.memory_gib else (row.memory_gb or 0.0) * 1e9 / row.devices_per_card
    return int(size)
