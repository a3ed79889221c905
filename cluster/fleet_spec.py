"""What a fleet file says: pools, the environment of each, what nodes are told. `polyfleet schema fleet` shows it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from cluster import environments, recipes
from cluster.catalogue import backend_name, builtin_vendors
from cluster.errors import SpecError, UserError
from cluster.fleet_spec_fields import Count, EnvironmentSpec, Name, Text, folder_field, labels_field, variables_field
from cluster.hosts.spec import HeadSpec, Hosts, HostSpec, SSHSpec
from cluster.policies import PolicySpec
from cluster.projects import Projects
from cluster.render import spec as engines
from cluster.strict_yaml import MAX_BYTES, load
from cluster.validation_errors import WrongValueError, prefix_field, validate_model

FLEETS = Path(__file__).parent / "fleets"

ENGINES_ALONE = ("accelerators", "cpus", "memory", "min_nodes", "max_nodes", "start_timeout_s", "keep_idle_s", "image",
                 "topology", "spot", "kubernetes", "ray_autoscaler", "slurm")  # fmt: skip


class PoolSpec(BaseModel, extra="forbid", frozen=True):
    """Nodes that are alike: one backend, one environment, one price."""

    backend: Annotated[str, AfterValidator(lambda word: prefix_field(backend_name, word))] = Field(
        description=f"Vendor's software path: {', '.join(builtin_vendors())}, an alias, or one that is installed"
    )
    environment: EnvironmentSpec = Field(
        default=EnvironmentSpec(interpreter=environments.CURRENT), description="Python of its nodes"
    )
    nodes: Count = Field(default=1, description="Ray nodes to start on this machine")
    devices: Count = Field(default=1, description="Into how many devices a CPU, or XLA on the CPU, is split")
    env: Annotated[dict[str, Text], AfterValidator(variables_field)] = Field(
        default={}, description="Variables set for its nodes"
    )
    labels: Annotated[dict[str, str], AfterValidator(labels_field)] = Field(
        default={}, description="Ray labels of its nodes"
    )
    price_per_hour: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="Of one device, in any one currency"
    )
    storage: Annotated[str, AfterValidator(folder_field)] = Field(
        default="", description="Checkpoint folder as its nodes see it"
    )
    shared_storage: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="All its hosts see one checkpoint folder: `up` refuses hosts that do not"
    )
    optional: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Leave the pool out, with words, where its environment cannot exist"
    )
    hosts: Hosts = Field(default=(), description="Machines of the pool, one node on each; none: this machine")
    min_hosts: Annotated[int, Field(strict=True, ge=0, le=256)] = Field(
        default=0, description="So many of the hosts are enough for `up`; 0: all of them"
    )
    ssh: SSHSpec | None = Field(default=None, description="How its hosts are reached, over the fleet's `ssh`")

    @model_validator(mode="before")
    @classmethod
    def _environment_of_hosts(cls, data: Any) -> Any:
        """`current` is the Python of this machine: hosts have the same packages from the lock."""
        if isinstance(data, dict) and data.get("hosts") and not data.get("environment"):
            return {**data, "environment": {"lock": "main"}}
        return data

    @model_validator(mode="after")
    def _on_hosts(self) -> "PoolSpec":
        names = [host.name for host in self.hosts]
        if doubled := next((h for h in self.hosts if names.count(h.name) > 1), None):
            raise WrongValueError(f"host {doubled.host!r} stands there twice", "name each host once", field="hosts")
        if self.hosts and self.nodes != 1:
            raise WrongValueError("a pool with hosts has one node on each", "leave `nodes` out", field="nodes")
        if self.hosts and self.environment.interpreter == environments.CURRENT:
            said = "`current` is the Python of this machine, not of its hosts"
            remedy = f"write one of {', '.join(recipes.NAMES)}, or {{interpreter: PATH}} with a path on the hosts"
            raise WrongValueError(said, remedy, field="environment")
        if self.shared_storage and not self.hosts:
            said = "only hosts can fail to share a storage, and the pool has none"
            raise WrongValueError(said, "leave it out, or name the pool's `hosts`", field="shared_storage")
        if self.min_hosts > len(self.hosts):
            said = f"{self.min_hosts} hosts are wanted of {len(self.hosts)}"
            raise WrongValueError(said, "lower it, or name more hosts", field="min_hosts")
        return self

    @model_validator(mode="after")
    def _countable(self) -> "PoolSpec":
        if self.devices > 1 and self.counts_devices:
            raise WrongValueError(
                f"{self.devices} would split a CPU, but {self.backend} devices are counted where they are",
                "leave it out; limit a job by its resources instead",
                field="devices",
            )
        return self

    @property
    def emulated(self) -> bool:
        """Computes on the CPU whatever its backend: XLA with its CPU runtime."""
        return self.backend == "tpu" and self.env.get("PJRT_DEVICE") == "CPU"

    @property
    def counts_devices(self) -> bool:
        """Its devices are found where they are, each for one node alone; a CPU is only shared out."""
        return self.backend != "cpu" and not self.emulated

    @property
    def environment_name(self) -> str:
        return self.environment.name

    # What engines that start nodes elsewhere need (cluster/render): `polyfleet render`.
    accelerators: engines.Accelerators | None = None
    cpus: engines.Cpus | None = None
    memory: engines.Memory | None = None
    min_nodes: engines.MinNodes | None = None
    max_nodes: engines.MaxNodes | None = None
    start_timeout_s: engines.Whole | None = Field(
        default=None, description="A node of an autoscaler that has not come by then is not waited for (600)"
    )
    keep_idle_s: engines.Whole | None = Field(
        default=None, description="So long an unused node of an autoscaler keeps its agent, and cannot go (300)"
    )
    image: engines.PoolImage = ""
    topology: engines.Topology = ""
    spot: engines.Spot = False
    kubernetes: engines.KubernetesPool | None = Field(default=None, description="Of its pods (`render kuberay`)")
    ray_autoscaler: engines.AutoscalerPool | None = Field(
        default=None, description="Of its machines (`render ray-autoscaler`)"
    )
    slurm: engines.SlurmPool | None = Field(default=None, description="Options of sbatch (`render slurm`)")

    @model_validator(mode="after")
    def _renderable(self) -> "PoolSpec":
        if self.accelerators and self.accelerators.partition(":")[0] != self.backend:
            said = f"{self.accelerators} is not of the back end {self.backend}"
            raise WrongValueError(said, "name a kind of that back end", field="accelerators")
        if self.topology and self.backend != "tpu":
            raise WrongValueError("only TPU slices have one", "leave it out", field="topology")
        if self.min_nodes is not None and (self.max_nodes is None or self.max_nodes < self.min_nodes):
            raise WrongValueError(
                f"must be at least min_nodes ({self.min_nodes}), got {self.max_nodes}",
                "write both, or `nodes` for a fixed number",
                field="max_nodes",
            )
        if self.max_nodes is not None and self.nodes != 1:
            raise WrongValueError("is a fixed number, beside min_nodes and max_nodes", "leave one out", field="nodes")
        return self

    @property
    def only_rendered(self) -> list[str]:
        """Its fields that say something to engines alone: no node of this machine is what they ask for."""
        said = ((name, getattr(self, name)) for name in ENGINES_ALONE)
        return [name for name, value in said if value is not None and value is not False and value != ""]


class FleetSpec(BaseModel, extra="forbid", frozen=True):
    """All pools of one fleet."""

    name: Name = Field(default="local", description="What status and reports call it")
    pools: Annotated[dict[Name, PoolSpec], Field(min_length=1, max_length=64)] = Field(
        description="By name: 1 to 31 of a-z, 0-9 and -"
    )
    head: HeadSpec = Field(default=HeadSpec(), description="Where Ray's head listens, for a fleet with hosts")
    ssh: SSHSpec = Field(default=SSHSpec(), description="How the hosts of all pools are reached")
    policy: PolicySpec = Field(default=PolicySpec(), description="Which jobs are served first: a name, or more of it")
    projects: Projects = Field(default_factory=dict, description="Quotas by project, for jobs with `project`")
    kubernetes: engines.KubernetesFleet | None = Field(default=None, description="For `render kuberay`")
    ray_autoscaler: engines.AutoscalerFleet | None = Field(default=None, description="For `render ray-autoscaler`")
    slurm: engines.SlurmFleet | None = Field(default=None, description="For `render slurm`")

    @model_validator(mode="after")
    def _spans_machines(self) -> "FleetSpec":
        if self.head.host:
            self._with_head_elsewhere()
        if self.placements and not self.head.address:
            raise WrongValueError(
                "is required for a fleet with hosts",
                "name the IP address of this machine that they reach; by default Ray listens on loopback only",
                field="head.address",
            )
        counted = {name: pool for name, pool in self.pools.items() if pool.counts_devices}
        accelerators = [(pool.backend, host.host, name) for name, pool in counted.items() for host in pool.hosts]
        for backend, host, name in accelerators:
            others = [other for b, h, other in accelerators if (b, h) == (backend, host) and other != name]
            if others:
                raise WrongValueError(
                    f"pools {name} and {others[0]} both have the {backend} devices of host {host}",
                    "leave the host in one of them: a device belongs to one node",
                    field=f"pools.{others[0]}.hosts",
                )
        return self

    def _with_head_elsewhere(self) -> None:
        if not self.head.address:
            remedy = f"name the IP address of {self.head.host} that the hosts of the pools and this machine reach"
            raise WrongValueError("is required beside head.host", remedy, field="head.address")
        if here := next((name for name, pool in self.pools.items() if not pool.hosts), ""):
            said = f"the head is on {self.head.host}, and a fleet with its head elsewhere has no nodes on this machine"
            raise WrongValueError(said, "name the pool's hosts, or leave head.host out", field=f"pools.{here}.hosts")
        for name, host in ((p.pool, p.host) for p in self.placements if p.host.name == self.head.host_name):
            if host.address not in ("", self.head.address):
                said = f"host {host.host} has the head at {self.head.address}, and is {host.address} here"
                raise WrongValueError(said, "name one of them in both places", field=f"pools.{name}.hosts")

    @property
    def placements(self) -> "list[Placement]":
        """Each pool's nodes on other machines."""
        return [
            Placement(name, host, (pool.ssh or SSHSpec()).over(self.ssh))
            for name, pool in self.pools.items()
            for host in pool.hosts
        ]

    def on_host(self, name: str) -> "FleetSpec":
        """What the host of that name has of it, as pools of that machine."""
        alone = {"hosts": (), "min_hosts": 0, "ssh": None, "shared_storage": False}
        there = {
            pool: spec.model_copy(update={**alone, "devices": host.devices or spec.devices})
            for pool, spec in self.pools.items()
            for host in spec.hosts
            if host.name == name
        }
        return self.model_copy(update={"pools": there, "head": HeadSpec(), "ssh": SSHSpec(), "projects": {}})

    def here(self) -> "FleetSpec":
        """What of it is on this machine. May have no pools: then the head alone runs here."""
        return self.model_copy(update={"pools": {name: pool for name, pool in self.pools.items() if not pool.hosts}})


@dataclass(frozen=True, slots=True)
class Placement:
    """One node of a pool on another machine."""

    pool: str
    host: HostSpec
    ssh: SSHSpec

    @property
    def node(self) -> str:
        return f"{self.pool}-{self.host.name}"


def parse_fleet(data: Any, source: str = "") -> FleetSpec:
    """Raises SpecError naming the field."""
    return validate_model(FleetSpec, data, source)


def load_fleet(path: Path) -> FleetSpec:
    """The fleet file at `path`. Raises SpecError with field or line, UserError when the file cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode()
    except OSError as e:
        raise UserError(
            f"cannot read {path}: {e.strerror}", "name a fleet file; `polyfleet schema fleet` tells its form"
        ) from None
    except UnicodeDecodeError as e:
        raise SpecError("", f"{path}: byte {e.start} is not UTF-8", "save the file as UTF-8 text") from None
    return parse_fleet(load(text, str(path), FleetSpec), str(path))


def fleet_schema() -> dict[str, Any]:
    """JSON Schema of a fleet file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | FleetSpec.model_json_schema()


def default_fleet(found: Iterable[str] = ()) -> FleetSpec:
    """One pool, named after its backend, for each backend in `found`; a `cpu` pool where nothing was found."""
    backends = list(dict.fromkeys(map(backend_name, found))) or ["cpu"]
    return parse_fleet({"pools": {backend: {"backend": backend} for backend in backends}})


def demo_fleet(found: Iterable[str] = ()) -> tuple[FleetSpec, list[tuple[str, str]]]:
    """The demo's pools and those of the accelerators in `found`, as far as they are `possible` here."""
    fleet = load_fleet(FLEETS / "demo.yaml")
    accelerators = {b: PoolSpec(backend=b) for b in map(backend_name, found) if b != "cpu"}
    return drop_unavailable_pools(fleet.model_copy(update={"pools": accelerators | fleet.pools}))


def drop_unavailable_pools(fleet: FleetSpec) -> tuple[FleetSpec, list[tuple[str, str]]]:
    """The fleet without its optional pools whose environment cannot exist here; and which those are, and why.

    Asked are system, Python and disk (`environments.refusal`). Whether packages can be fetched shows when they are.
    """
    asked = {name: pool for name, pool in fleet.pools.items() if pool.optional and not pool.hosts}
    reasons = {name: environments.unsupported_reason(pool.environment) for name, pool in asked.items()}
    left_out = [(name, why) for name, why in reasons.items() if why]
    kept = {name: pool for name, pool in fleet.pools.items() if not reasons.get(name)}
    return fleet.model_copy(update={"pools": kept}), left_out


def attachable(fleet: FleetSpec) -> FleetSpec:
    """The fleet, unless it has machines of its own: nodes of an existing cluster are started by others."""
    for name, pool in fleet.pools.items():
        if pool.hosts:
            raise SpecError(
                f"pools.{name}.hosts",
                "`polyfleet up --address` uses the nodes that a Ray cluster has, and starts none on hosts",
                "leave it out, or run `polyfleet up -f` without --address",
            )
    return fleet


def startable(fleet: FleetSpec) -> FleetSpec:
    """The fleet, unless a pool of it can only be rendered. Raises SpecError naming its fields."""
    for name, pool in fleet.pools.items():
        if fields := pool.only_rendered:
            raise SpecError(
                f"pools.{name}.{fields[0]}",
                f"`polyfleet up` starts nodes on this machine as they are and cannot heed {', '.join(fields)}",
                "render the file for an engine, `polyfleet render kuberay | ray-autoscaler | slurm`, and give it to "
                "`up --address` of the cluster; or leave them out",
            )
    return fleet
