"""What a pool's nodes are for an engine: kind and number of devices, how many nodes there may be, what they are told.

Where a pool lacks what the engine needs, a SpecError names the field and what to write.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import PurePosixPath

from cluster import catalogue, environments
from cluster.errors import SpecError
from cluster.fleet_spec import FleetSpec, PoolSpec
from cluster.ray_node import SETTINGS, unmasked
from cluster.render.spec import size_bytes, split_accelerators

HOOK = "cluster.ray_start_hook.prepare_node_of_an_engine"
EXAMPLES = {
    "accelerators": "write kind and count of one node, e.g. nvidia:H100-80GB:8",
    "cpus": "write how many CPUs one node has, e.g. 96",
    "memory": "write how much memory one node has, e.g. 1800GB",
    "image": "name a container image that has Ray, Polyfleet and the pool's torch",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Nodes of one pool, between `least` and `most`, of which `hosts` come and go as one: a TPU slice.

    `kind` is "cpu" where there are no `devices`; `resource` is Ray's for them.
    """

    pool: str
    spec: PoolSpec
    kind: str
    devices: int
    resource: str
    least: int
    most: int
    hosts: int = 1

    @property
    def grows(self) -> bool:
        return self.least < self.most

    @property
    def memory_bytes(self) -> int:
        return size_bytes(self.spec.memory) if self.spec.memory else 0

    def resources(self) -> dict[str, int]:
        """Of one node, as Ray counts."""
        return {"CPU": self.spec.cpus or 0} | ({self.resource: self.devices} if self.devices else {})

    def labels(self) -> dict[str, str]:
        """Ray's labels of its nodes; our agents and Ray's autoscaler go by them."""
        return {
            "polyfleet.io/pool": self.pool,
            "polyfleet.io/backend": self.spec.backend,
            "polyfleet.io/environment": environment_name(self.spec),
        } | self.spec.labels

    def variables(self, storage: str = "", neighbours: Mapping[str, str] | None = None) -> dict[str, str]:
        """What the agent of each of its nodes reads from its environment (cluster/raylets.py tells ours the same)."""
        told = {
            "POLYFLEET_POOL": self.pool,
            "POLYFLEET_BACKEND": self.spec.backend,
            "POLYFLEET_ENVIRONMENT": environment_name(self.spec),
        }
        if self.spec.devices > 1:
            told["POLYFLEET_DEVICES"] = str(self.spec.devices)
        if self.spec.env:
            told["POLYFLEET_POOL_VARIABLES"] = ",".join(self.spec.env)
        if storage:
            told["POLYFLEET_STORAGE"] = storage
        if neighbours:
            told["POLYFLEET_NEIGHBOURS"] = json.dumps(dict(neighbours))
        return told | self.spec.env


def environment_name(pool: PoolSpec) -> str:
    """As labels tell it. An image is an environment of its own: ranks of one group must agree on it."""
    if pool.image and pool.environment.interpreter == environments.CURRENT:
        return f"image-{hashlib.sha256(pool.image.encode()).hexdigest()[:8]}"
    return pool.environment_name


def settings() -> dict[str, str]:
    """Variables of every Ray node, the head too."""
    return SETTINGS | {"RAY_START_HOOK": HOOK} | unmasked()


def ray_version() -> str:
    """Of the Ray that is installed here: nodes must have the same."""
    return version("ray")


def shapes(fleet: FleetSpec, needed: tuple[str, ...]) -> list[Shape]:
    """Of all pools. Raises SpecError where one lacks a `needed` field, or its numbers do not fit each other."""
    return [_shape(name, pool, needed) for name, pool in fleet.pools.items()]


def lacking(field: str, what: str, remedy: str) -> SpecError:
    return SpecError(field, f"is required to render {what}", remedy)


def _shape(name: str, pool: PoolSpec, needed: tuple[str, ...]) -> Shape:
    on_cpus = pool.backend == "cpu" or pool.emulated
    if on_cpus and pool.accelerators:
        raise SpecError(f"pools.{name}.accelerators", "the pool computes on CPUs", "leave it out")
    for field in (*(() if on_cpus else ("accelerators",)), *needed):
        if not getattr(pool, field):
            raise lacking(f"pools.{name}.{field}", "this pool", EXAMPLES[field])
    if name.endswith("-"):
        raise SpecError(f"pools.{name}", "a label's value cannot end with `-`", "rename the pool")
    kind, devices = ("cpu", 0) if on_cpus else split_accelerators(pool.accelerators or "")
    hosts = _hosts(name, pool, kind, devices)
    least, most = _range(pool)
    for field, count in (("max_nodes" if pool.max_nodes else "nodes", most), ("min_nodes", least)):
        if count % hosts:
            whole = " or ".join(str(n) for n in (count // hosts * hosts, (count // hosts + 1) * hosts) if n)
            raise SpecError(
                f"pools.{name}.{field}", f"a slice {pool.topology} has {hosts} nodes, {count} are not whole slices",
                f"write {whole}"
            )  # fmt: skip
    return Shape(name, pool, kind, devices, catalogue.ray_resource(pool.backend, pool.emulated), least, most, hosts)


def _range(pool: PoolSpec) -> tuple[int, int]:
    return (pool.nodes, pool.nodes) if pool.max_nodes is None else (pool.min_nodes or 0, pool.max_nodes)


def _hosts(name: str, pool: PoolSpec, kind: str, devices: int) -> int:
    """Of one slice. Raises SpecError for a topology that such nodes cannot make up."""
    known = catalogue.kubernetes_label(kind, devices)
    smallest = known.topology if known else ""
    field = f"pools.{name}.topology"
    if not pool.topology:
        if smallest:
            raise lacking(field, f"a pool of {kind}", f"write the slice's chips, e.g. {smallest}")
        return 1
    if smallest and pool.topology.count("x") != smallest.count("x"):
        raise SpecError(field, f"{pool.topology} is not a topology of {kind}", f"write it like {smallest}")
    chips = math.prod(map(int, pool.topology.split("x")))
    hosts, rest = divmod(chips, devices)
    in_slice = known.slice_devices if known else None
    if rest or (hosts > 1 and in_slice and devices != in_slice):
        per_node = in_slice if in_slice and chips % in_slice == 0 else chips
        raise SpecError(
            f"pools.{name}.accelerators",
            f"nodes of {devices} chips cannot make up a slice {pool.topology} of {chips}",
            f"write {kind}:{per_node}",
        )
    return hosts


def below(folder: str, name: str) -> str:
    """A pool's checkpoint folder in one that all nodes see."""
    return str(PurePosixPath(folder) / name)


def storages(fleet: FleetSpec, folder: str) -> dict[str, str]:
    """Checkpoint folder of each pool: its own, else one of its name in the shared `folder`."""
    return {name: pool.storage or below(folder, name) for name, pool in fleet.pools.items()}


def others(storages: Mapping[str, str], pool: str) -> dict[str, str]:
    return {name: path for name, path in storages.items() if name != pool}
