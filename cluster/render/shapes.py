"""Shape of a pool's nodes for an engine: devices, number of nodes, labels and variables.

If a pool lacks something that the engine needs, a SpecError names the field and what to write.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import PurePosixPath

from cluster import catalogue
from cluster.environments import environments
from cluster.errors import SpecError
from cluster.fleet.engine_spec import size_bytes, split_accelerators
from cluster.fleet.fleet_spec import FleetSpec, PoolSpec
from cluster.nodes.ray_node import SETTINGS, visibility_settings

HOOK = "cluster.nodes.ray_start_hook.prepare_node_of_an_engine"
EXAMPLES = {
    "accelerators": "write kind and count per node, e.g. nvidia:H100-80GB:8",
    "cpus": "write the number of CPUs per node, e.g. 96",
    "memory": "write the memory per node, e.g. 1800GB",
    "image": "name a container image that has Ray, Polyfleet and the pool's torch",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Nodes of one pool, between `min_nodes` and `max_nodes`. `hosts` of them start and stop together: a TPU slice.

    `kind` is "cpu" if there are no `devices`; `resource` is the Ray resource of the devices.
    """

    pool: str
    spec: PoolSpec
    kind: str
    devices: int
    resource: str
    min_nodes: int
    max_nodes: int
    hosts: int = 1

    @property
    def grows(self) -> bool:
        return self.min_nodes < self.max_nodes

    @property
    def memory_bytes(self) -> int:
        return size_bytes(self.spec.memory) if self.spec.memory else 0

    def resources(self) -> dict[str, int]:
        """Return the Ray resources of one node."""
        return {"CPU": self.spec.cpus or 0} | ({self.resource: self.devices} if self.devices else {})

    def labels(self) -> dict[str, str]:
        """Return the Ray labels of its nodes, which our agents and Ray's autoscaler use."""
        return {
            "polyfleet.io/pool": self.pool,
            "polyfleet.io/backend": self.spec.backend,
            "polyfleet.io/environment": environment_name(self.spec),
        } | self.spec.labels

    def variables(self, storage: str = "", neighbours: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that the agents of its nodes read; cluster/nodes/raylets.py sets the same ones."""
        variables = {
            "POLYFLEET_POOL": self.pool,
            "POLYFLEET_BACKEND": self.spec.backend,
            "POLYFLEET_ENVIRONMENT": environment_name(self.spec),
        }
        if self.spec.devices > 1:
            variables["POLYFLEET_DEVICES"] = str(self.spec.devices)
        if self.spec.env:
            variables["POLYFLEET_POOL_VARIABLES"] = ",".join(self.spec.env)
        if storage:
            variables["POLYFLEET_STORAGE"] = storage
        if self.spec.object_store:
            variables["POLYFLEET_OBJECT_STORE"] = self.spec.object_store
        if neighbours:
            variables["POLYFLEET_LOCAL_POOLS"] = json.dumps(dict(neighbours))
        return variables | self.spec.env


def environment_name(pool: PoolSpec) -> str:
    """Return the environment's name for labels.

    An image is an environment: ranks of one group must agree on it.
    """
    if pool.image and pool.environment.interpreter == environments.CURRENT:
        return f"image-{hashlib.sha256(pool.image.encode()).hexdigest()[:8]}"
    return pool.environment_name


def settings() -> dict[str, str]:
    """Return the variables of every Ray node, including the head."""
    return SETTINGS | {"RAY_START_HOOK": HOOK} | visibility_settings()


def ray_version() -> str:
    """Return the version of the Ray installed here; nodes must have the same."""
    return version("ray")


def shapes(fleet: FleetSpec, needed: tuple[str, ...]) -> list[Shape]:
    """Return the shapes of all pools.

    Raises SpecError for a missing `needed` field or inconsistent numbers.
    """
    return [_shape(name, pool, needed) for name, pool in fleet.pools.items()]


def missing_field(field: str, what: str, remedy: str) -> SpecError:
    return SpecError(field, f"is required to render {what}", remedy)


def _shape(name: str, pool: PoolSpec, needed: tuple[str, ...]) -> Shape:
    on_cpus = pool.backend == "cpu" or pool.emulated
    if on_cpus and pool.accelerators:
        raise SpecError(f"pools.{name}.accelerators", "the pool computes on CPUs", "leave the field out")
    for field in (*(() if on_cpus else ("accelerators",)), *needed):
        if not getattr(pool, field):
            raise missing_field(f"pools.{name}.{field}", "this pool", EXAMPLES[field])
    if name.endswith("-"):
        raise SpecError(f"pools.{name}", "a label's value cannot end with `-`", "rename the pool")
    kind, devices = ("cpu", 0) if on_cpus else split_accelerators(pool.accelerators or "")
    hosts = _hosts(name, pool, kind, devices)
    min_nodes, max_nodes = _range(pool)
    for field, count in (("max_nodes" if pool.max_nodes else "nodes", max_nodes), ("min_nodes", min_nodes)):
        if count % hosts:
            valid = " or ".join(str(n) for n in (count // hosts * hosts, (count // hosts + 1) * hosts) if n)
            raise SpecError(
                f"pools.{name}.{field}", f"{count} is not a multiple of {hosts}, the nodes of a slice {pool.topology}",
                f"write {valid}"
            )  # fmt: skip
    return Shape(
        name, pool, kind, devices, catalogue.ray_resource(pool.backend, pool.emulated), min_nodes, max_nodes, hosts
    )


def _range(pool: PoolSpec) -> tuple[int, int]:
    return (pool.nodes, pool.nodes) if pool.max_nodes is None else (pool.min_nodes or 0, pool.max_nodes)


def _hosts(name: str, pool: PoolSpec, kind: str, devices: int) -> int:
    """Return the number of nodes of one slice.

    Raises SpecError for a topology that such nodes cannot form.
    """
    label = catalogue.kubernetes_label(kind, devices)
    smallest = label.topology if label else ""
    field = f"pools.{name}.topology"
    if not pool.topology:
        if smallest:
            raise missing_field(field, f"a pool of {kind}", f"write the topology of its slices, e.g. {smallest}")
        return 1
    if smallest and pool.topology.count("x") != smallest.count("x"):
        raise SpecError(field, f"{pool.topology} is not a topology of {kind}", f"write it like {smallest}")
    chips = math.prod(map(int, pool.topology.split("x")))
    hosts, rest = divmod(chips, devices)
    in_slice = label.slice_devices if label else None
    if rest or (hosts > 1 and in_slice and devices != in_slice):
        per_node = in_slice if in_slice and chips % in_slice == 0 else chips
        raise SpecError(
            f"pools.{name}.accelerators",
            f"nodes of {devices} chips cannot form a slice {pool.topology} of {chips} chips",
            f"write {kind}:{per_node}",
        )
    return hosts


def storage_path(folder: str, name: str) -> str:
    """Return a pool's checkpoint folder in a folder that all nodes share."""
    return str(PurePosixPath(folder) / name)


def storages(fleet: FleetSpec, folder: str) -> dict[str, str]:
    """Return each pool's checkpoint folder: its own, else one of its name in the shared `folder`."""
    return {name: pool.storage_folder or storage_path(folder, name) for name, pool in fleet.pools.items()}


def other_storages(storages: Mapping[str, str], pool: str) -> dict[str, str]:
    return {name: path for name, path in storages.items() if name != pool}
