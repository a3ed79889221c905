"""The fleet: pools, nodes, devices, findings."""

from typing import Literal

from typing_extensions import TypedDict

from orchestrator.views.values import Scalar

FindingLevel = Literal["info", "warning", "error"]


class DeviceView(TypedDict):
    """One accelerator, or all CPUs of a node as one device."""

    backend: str
    kind: str
    index: int
    """Number on its node, as the backend's visibility variable counts."""
    name: str
    uuid: str
    total_memory_bytes: int | None
    free_memory_bytes: int | None
    driver_version: str
    architecture: str
    emulated: bool
    unavailable_reason: str
    integrated: bool
    """Whether it is part of a CPU."""
    unified_memory: bool
    """Whether it uses the machine's own memory."""
    pci_address: str
    numa_node: int | None
    properties: dict[str, Scalar]
    allocated_to: str | None
    """Id of the job that holds it."""


class DeviceUseView(TypedDict):
    """Load of a device at one moment; null for values that it does not measure."""

    backend: str
    index: int
    busy_percent: float | None
    used_memory_bytes: int | None
    power_w: float | None
    temperature_c: float | None


class NodeFindingView(TypedDict):
    """A finding about a node or its devices."""

    level: FindingLevel
    subject: str
    message: str
    remedy: str


class FindingView(NodeFindingView):
    """A line of `doctor`."""

    node: str
    """The node it concerns; empty for the server and the fleet."""


class NoticeView(TypedDict):
    """Notice that a node is about to stop."""

    reason: str
    deadline_s: float
    """Seconds until it stops, at the time of the notice."""


class NodeView(TypedDict):
    """A node with its devices. Facts of its agent are empty or null until the agent has started."""

    node: str
    state: Literal["ready", "starting", "resting", "drained", "quarantined", "silent", "lost", "removed", "unknown"]
    """`removed` and `unknown` (no such node) appear only in responses about one node."""
    reason: str
    """Why it is silent, lost, drained or quarantined; it may be empty."""
    closed: str
    """Why it takes no new jobs, or empty."""
    note: str
    """Recent use of its devices by another program of the Ray cluster."""
    pool: str
    devices: list[DeviceView]
    ray_node_id: str
    host: str
    address: str
    backend: str
    environment: str
    protocol: int | None
    versions: dict[str, str]
    """Versions of Python, Ray, torch and others in its environment."""
    cpu_count: int | None
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    load_1min: float | None
    disk_free_bytes: int | None
    agent_pid: int | None
    agent_created: str | float
    """When the process `agent_pid` started."""
    storage: str
    """Folder of its pool's checkpoints."""
    storage_id: str
    """Nodes with the same one share the storage; empty if unknown."""
    object_store: str
    """URI to which checkpoints and files of jobs in `storage` are uploaded; empty for none."""
    pending_uploads: int
    """Checkpoints, and folders of jobs' files, in `storage` that are not in the object store yet."""
    neighbours: list[str]
    """Other pools whose checkpoints it can read."""
    findings: list[NodeFindingView]
    notice: NoticeView | None
    use: list[DeviceUseView]
    """Load of accelerators that can be read without opening them."""
    data: list[str]
    """Cached data of jobs, by the first 16 digits of hashes of their content and source."""


class PoolView(TypedDict):
    """A pool of the fleet."""

    pool: str
    backend: str
    environment: str
    kinds: list[str]
    nodes: int
    """Nodes that are not lost."""
    nodes_declared: int
    devices: int
    """Devices that can be used."""
    free: int
    price_per_hour: float
    """Price of one device; 0 if the fleet file declares none."""


class PolicyView(TypedDict):
    """Order in which waiting jobs are served."""

    name: str
    every_s: float
    """Interval of full decisions, in which jobs of equal priority may be stopped or moved."""
    ageing_s: float
    """Waiting time that raises a job's priority by one; 0: never."""
    explore_device_s: float
    """Device-seconds for which a workload may use an unmeasured kind before measured ones come first."""


class QuotaView(TypedDict):
    """Use of one quota of a project."""

    project: str
    kind: str
    """Empty for a project without quota."""
    quota: int | None
    held: int | None
    borrowed: int
    """Devices beyond the quota."""
    borrow: bool
    """Whether the project may use more than its quota."""


class SkippedPoolView(TypedDict):
    """A pool that cannot exist here."""

    pool: str
    reason: str


class FleetView(TypedDict):
    """The fleet by pools."""

    name: str
    address: str
    state: str
    """up, or why it cannot be used."""
    skipped_pools: list[SkippedPoolView]
    pools: list[PoolView]
    policy: PolicyView
    projects: list[QuotaView]
