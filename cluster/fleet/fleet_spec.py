"""Fleet file: pools, their environments, and settings of nodes.

`polyfleet schema fleet` prints its schema.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from cluster.catalogue import backend_name, builtin_vendors
from cluster.environments import environments, recipes
from cluster.environments.environment_spec import EnvironmentSpec
from cluster.errors import SpecError, UserError
from cluster.fleet import engine_spec as engines
from cluster.fleet.fleet_spec_fields import Count, Name, Text, labels_field, storage_field, variables_field
from cluster.fleet.host_spec import HeadSpec, Hosts, HostSpec, SSHSpec
from cluster.fleet.policies import SchedulerSpec, removed_form_error
from cluster.fleet.projects import Projects
from cluster.input.checkpoint_location import is_uri
from cluster.input.strict_yaml import MAX_BYTES, load
from cluster.input.validation_errors import WrongValueError, prefix_field, validate_model

FLEETS = Path(__file__).parent / "fleets"

ENGINE_FIELDS = ("accelerators", "cpus", "memory", "min_nodes", "max_nodes", "start_timeout_s", "keep_idle_s", "image",
                 "topology", "spot", "kubernetes", "ray_autoscaler", "slurm")  # fmt: skip


class PoolSpec(BaseModel, extra="forbid", frozen=True):
    """A pool: equal nodes with one backend, one environment and one price."""

    backend: Annotated[str, AfterValidator(lambda name: prefix_field(backend_name, name))] = Field(
        description=f"Vendor's software path: {', '.join(builtin_vendors())}, an alias, or an installed plugin"
    )
    environment: EnvironmentSpec = Field(
        default=EnvironmentSpec(interpreter=environments.CURRENT), description="Python environment of its nodes"
    )
    nodes: Count = Field(default=1, description="Ray nodes to start on this machine")
    devices: Count = Field(default=1, description="Number of devices into which a CPU, or XLA on the CPU, is split")
    env: Annotated[dict[str, Text], AfterValidator(variables_field)] = Field(
        default={}, description="Environment variables of its nodes"
    )
    labels: Annotated[dict[str, str], AfterValidator(labels_field)] = Field(
        default={}, description="Ray labels of its nodes"
    )
    price_per_hour: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="Price of one device per hour, in any one currency"
    )
    storage: Annotated[str, AfterValidator(storage_field)] = Field(
        default="",
        description="Checkpoint folder, as a path on its nodes, or the URI of an object store, such as s3://BUCKET/PREFIX",
    )
    shared_storage: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="Require that all its hosts share one checkpoint folder; `up` refuses hosts that do not",
    )
    optional: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Skip the pool, with a message, if its environment cannot exist"
    )
    hosts: Hosts = Field(default=(), description="Machines of the pool, with one node each (default: this machine)")
    min_hosts: Annotated[int, Field(strict=True, ge=0, le=256)] = Field(
        default=0, description="Minimum number of hosts for `up` (0: all)"
    )
    ssh: SSHSpec | None = Field(default=None, description="SSH settings of its hosts, which override the fleet's `ssh`")

    @model_validator(mode="before")
    @classmethod
    def _environment_of_hosts(cls, data: Any) -> Any:
        """Set the default environment of hosts: the lock, as `current` is the Python of this machine."""
        if isinstance(data, dict) and data.get("hosts") and not data.get("environment"):
            return {**data, "environment": {"lock": "main"}}
        return data

    @model_validator(mode="after")
    def _check_hosts(self) -> "PoolSpec":
        names = [host.name for host in self.hosts]
        if duplicate := next((h for h in self.hosts if names.count(h.name) > 1), None):
            raise WrongValueError(f"host {duplicate.host!r} is listed twice", "name each host once", field="hosts")
        if self.hosts and self.nodes != 1:
            raise WrongValueError("a pool with hosts has one node on each", "leave `nodes` out", field="nodes")
        if self.hosts and self.environment.interpreter == environments.CURRENT:
            message = "`current` is the Python of this machine, not of its hosts"
            remedy = f"write one of {', '.join(recipes.NAMES)}, or {{interpreter: PATH}} with a path on the hosts"
            raise WrongValueError(message, remedy, field="environment")
        if self.shared_storage and not self.hosts:
            message = "applies to pools with hosts, and this pool has none"
            raise WrongValueError(message, "leave the field out, or name the pool's `hosts`", field="shared_storage")
        if self.shared_storage and self.object_store:
            message = f"requires one folder on all hosts, and `storage` is {self.object_store}"
            raise WrongValueError(
                message, "leave the field out: every host reads the object store", field="shared_storage"
            )
        if self.min_hosts > len(self.hosts):
            message = f"{self.min_hosts} hosts are required, and the pool has {len(self.hosts)}"
            raise WrongValueError(message, "lower the number, or name more hosts", field="min_hosts")
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> "PoolSpec":
        if self.devices > 1 and self.counts_devices:
            raise WrongValueError(
                f"{self.devices} would split a CPU, but {self.backend} devices are counted on their nodes",
                "leave the field out; limit a job by its resources instead",
                field="devices",
            )
        return self

    @property
    def emulated(self) -> bool:
        """Whether it computes on the CPU despite its backend: XLA with its CPU runtime."""
        return self.backend == "tpu" and self.env.get("PJRT_DEVICE") == "CPU"

    @property
    def counts_devices(self) -> bool:
        """Whether its devices are discovered on their nodes, each for one node alone; a CPU is only divided."""
        return self.backend != "cpu" and not self.emulated

    @property
    def environment_name(self) -> str:
        return self.environment.name

    # Fields for engines that start nodes elsewhere (cluster/render), used by `polyfleet render`.
    accelerators: engines.Accelerators | None = None
    cpus: engines.Cpus | None = None
    memory: engines.Memory | None = None
    min_nodes: engines.MinNodes | None = None
    max_nodes: engines.MaxNodes | None = None
    start_timeout_s: engines.PositiveInteger | None = Field(
        default=None, description="Seconds to wait for a node of an autoscaler (default: 600)"
    )
    keep_idle_s: engines.PositiveInteger | None = Field(
        default=None,
        description="Seconds that an unused node of an autoscaler keeps its agent, and so stays (default: 300)",
    )
    image: engines.PoolImage = ""
    topology: engines.Topology = ""
    spot: engines.Spot = False
    kubernetes: engines.KubernetesPool | None = Field(
        default=None, description="Settings of its pods (`render kuberay`)"
    )
    ray_autoscaler: engines.AutoscalerPool | None = Field(
        default=None, description="Settings of its machines (`render ray-autoscaler`)"
    )
    slurm: engines.SlurmPool | None = Field(default=None, description="Options of sbatch (`render slurm`)")

    @model_validator(mode="after")
    def _check_engine_fields(self) -> "PoolSpec":
        if self.accelerators and self.accelerators.partition(":")[0] != self.backend:
            message = f"{self.accelerators} is not a kind of the back end {self.backend}"
            raise WrongValueError(message, "name a kind of that back end", field="accelerators")
        if self.topology and self.backend != "tpu":
            raise WrongValueError("only TPU slices have a topology", "leave the field out", field="topology")
        if self.min_nodes is not None and (self.max_nodes is None or self.max_nodes < self.min_nodes):
            raise WrongValueError(
                f"must be at least min_nodes ({self.min_nodes}), got {self.max_nodes}",
                "write both, or `nodes` for a fixed number",
                field="max_nodes",
            )
        if self.max_nodes is not None and self.nodes != 1:
            raise WrongValueError(
                "is a fixed number, and min_nodes and max_nodes are set too",
                "leave `nodes` or the other two out",
                field="nodes",
            )
        return self

    @property
    def object_store(self) -> str:
        """URI to which the pool's checkpoints are uploaded; "" if `storage` is a folder."""
        return self.storage if is_uri(self.storage) else ""

    @property
    def storage_folder(self) -> str:
        """Folder of `storage`; "" for the default one, also with an object store: jobs save there first."""
        return "" if self.object_store else self.storage

    @property
    def only_rendered(self) -> list[str]:
        """The fields that are set and that only engines can use, not nodes of this machine."""
        fields = ((name, getattr(self, name)) for name in ENGINE_FIELDS)
        return [name for name, value in fields if value is not None and value is not False and value != ""]


class FleetSpec(BaseModel, extra="forbid", frozen=True):
    """A fleet file: all pools of one fleet, and its settings."""

    name: Name = Field(default="local", description="Name of the fleet as `status` shows it")
    pools: Annotated[dict[Name, PoolSpec], Field(min_length=1, max_length=64)] = Field(
        description="Pools by name (1 to 31 of a-z, 0-9 and -)"
    )
    head: HeadSpec = Field(default=HeadSpec(), description="Address of Ray's head, for a fleet with hosts")
    ssh: SSHSpec = Field(default=SSHSpec(), description="SSH settings of the hosts of all pools")
    scheduler: SchedulerSpec = Field(
        default=SchedulerSpec(), description="Policy that orders jobs of the same priority, and its settings"
    )
    projects: Projects = Field(default_factory=dict, description="Quotas by project, for jobs with `project`")
    kubernetes: engines.KubernetesFleet | None = Field(default=None, description="Settings for `render kuberay`")
    ray_autoscaler: engines.AutoscalerFleet | None = Field(
        default=None, description="Settings for `render ray-autoscaler`"
    )
    slurm: engines.SlurmFleet | None = Field(default=None, description="Settings for `render slurm`")

    @model_validator(mode="before")
    @classmethod
    def _policy_is_in_scheduler(cls, data: Any) -> Any:
        if isinstance(data, dict) and "policy" in data:
            raise removed_form_error(data["policy"])
        return data

    @model_validator(mode="after")
    def _check_hosts(self) -> "FleetSpec":
        if self.head.host:
            self._check_remote_head()
        if self.placements and not self.head.address:
            raise WrongValueError(
                "is required for a fleet with hosts",
                "name this machine's IP address for the hosts; by default Ray listens on loopback only",
                field="head.address",
            )
        counting_pools = {name: pool for name, pool in self.pools.items() if pool.counts_devices}
        accelerators = [(pool.backend, host.host, name) for name, pool in counting_pools.items() for host in pool.hosts]
        for backend, host, name in accelerators:
            other_pools = [other for b, h, other in accelerators if (b, h) == (backend, host) and other != name]
            if other_pools:
                raise WrongValueError(
                    f"pools {name} and {other_pools[0]} both have the {backend} devices of host {host}",
                    "keep the host in one of them: a device belongs to one node",
                    field=f"pools.{other_pools[0]}.hosts",
                )
        return self

    def _check_remote_head(self) -> None:
        if not self.head.address:
            remedy = f"name the IP address of {self.head.host} for the hosts of the pools and this machine"
            raise WrongValueError("is required beside head.host", remedy, field="head.address")
        if local_pool := next((name for name, pool in self.pools.items() if not pool.hosts), ""):
            message = (
                f"the head is on {self.head.host}, and a fleet with its head elsewhere has no nodes on this machine"
            )
            raise WrongValueError(
                message, "name the pool's hosts, or leave head.host out", field=f"pools.{local_pool}.hosts"
            )
        for name, host in ((p.pool, p.host) for p in self.placements if p.host.name == self.head.host_name):
            if host.address not in ("", self.head.address):
                message = (
                    f"host {host.host} has the head at {self.head.address}, and its address is {host.address} here"
                )
                raise WrongValueError(
                    message, "write one of these addresses in both fields", field=f"pools.{name}.hosts"
                )

    @property
    def placements(self) -> "list[Placement]":
        """The nodes of all pools on other machines."""
        return [
            Placement(name, host, (pool.ssh or SSHSpec()).with_defaults(self.ssh))
            for name, pool in self.pools.items()
            for host in pool.hosts
        ]

    def on_host(self, name: str) -> "FleetSpec":
        """Return the fleet's part on the host of that name, as pools of that machine."""
        local_settings = {"hosts": (), "min_hosts": 0, "ssh": None, "shared_storage": False}
        host_pools = {
            pool: spec.model_copy(update={**local_settings, "devices": host.devices or spec.devices})
            for pool, spec in self.pools.items()
            for host in spec.hosts
            if host.name == name
        }
        return self.model_copy(update={"pools": host_pools, "head": HeadSpec(), "ssh": SSHSpec(), "projects": {}})

    def local_part(self) -> "FleetSpec":
        """Return the fleet's part on this machine. It may have no pools: then only the head runs here."""
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
    """Validate a fleet file's data. Raises SpecError naming the field."""
    return validate_model(FleetSpec, data, source)


def load_fleet(path: Path) -> FleetSpec:
    """Read the fleet file at `path`. Raises SpecError with field or line, UserError if it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode()
    except OSError as e:
        raise UserError(
            f"cannot read {path}: {e.strerror}", "name a fleet file; `polyfleet schema fleet` prints its schema"
        ) from None
    except UnicodeDecodeError as e:
        raise SpecError("", f"{path}: byte {e.start} is not UTF-8", "save the file as UTF-8 text") from None
    return parse_fleet(load(text, str(path), FleetSpec), str(path))


def fleet_schema() -> dict[str, Any]:
    """Return the JSON Schema of a fleet file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | FleetSpec.model_json_schema()


def default_fleet(discovered: Iterable[str] = ()) -> FleetSpec:
    """Return a fleet with a pool per backend in `discovered`, named after it, else a `cpu` pool."""
    backends = list(dict.fromkeys(map(backend_name, discovered))) or ["cpu"]
    return parse_fleet({"pools": {backend: {"backend": backend} for backend in backends}})


def demo_fleet(discovered: Iterable[str] = ()) -> tuple[FleetSpec, list[tuple[str, str]]]:
    """Return the demo's pools, and pools of the `discovered` accelerators; see `drop_unavailable_pools`."""
    fleet = load_fleet(FLEETS / "demo.yaml")
    accelerators = {b: PoolSpec(backend=b) for b in map(backend_name, discovered) if b != "cpu"}
    return drop_unavailable_pools(fleet.model_copy(update={"pools": accelerators | fleet.pools}))


def drop_unavailable_pools(fleet: FleetSpec) -> tuple[FleetSpec, list[tuple[str, str]]]:
    """Drop optional pools whose environment cannot exist here.

    Returns the fleet, and (pool, reason) of the dropped pools. The check covers system, Python and disk space
    (`environments.unsupported_reason`), not whether the packages can be fetched.
    """
    optional = {name: pool for name, pool in fleet.pools.items() if pool.optional and not pool.hosts}
    reasons = {name: environments.unsupported_reason(pool.environment) for name, pool in optional.items()}
    dropped = [(name, reason) for name, reason in reasons.items() if reason]
    remaining = {name: pool for name, pool in fleet.pools.items() if not reasons.get(name)}
    return fleet.model_copy(update={"pools": remaining}), dropped


def check_attachable(fleet: FleetSpec) -> FleetSpec:
    """Return the fleet if it can be attached to a Ray cluster.

    Raises SpecError if it has hosts of its own.
    """
    for name, pool in fleet.pools.items():
        if pool.hosts:
            raise SpecError(
                f"pools.{name}.hosts",
                "`polyfleet up --address` uses the nodes of a running Ray cluster and starts none on hosts",
                "leave the field out, or run `polyfleet up -f` without --address",
            )
    return fleet


def check_startable(fleet: FleetSpec) -> FleetSpec:
    """Return the fleet if `up` can start it. Raises SpecError naming fields that only engines can use."""
    for name, pool in fleet.pools.items():
        if fields := pool.only_rendered:
            raise SpecError(
                f"pools.{name}.{fields[0]}",
                f"`polyfleet up` starts nodes on this machine and cannot apply {', '.join(fields)}",
                "leave these fields out, or run `polyfleet render kuberay | ray-autoscaler | slurm` with the file, "
                "then pass the file to `polyfleet up --address` of that cluster",
            )
    return fleet
