"""Words of DESIGN.md as plain, frozen data: what a node has. Everything here crosses Ray as JSON-like data (see
cluster/serialization.py).
"""

from dataclasses import dataclass, field

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the CPU of a node taken as one device. Found without opening it.

    `index` is the device's number on its node, as the backend's visibility variable counts. Bytes are None when
    unknown. `integrated` graphics are part of a CPU; `unified_memory` is the machine's own.
    """

    backend: str
    kind: str
    index: int
    name: str
    uuid: str = ""
    total_memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    driver_version: str = ""
    architecture: str = ""
    emulated: bool = False
    unavailable_reason: str = ""
    integrated: bool = False
    unified_memory: bool = False
    pci_address: str = ""
    numa_node: int | None = None
    properties: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something `doctor` tells: a level (`info`, `warning`, `error`), what it is about, what was seen, what to do."""

    level: str
    subject: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What the device `index` of a back end did when it was looked at; None for what it does not tell."""

    backend: str
    index: int
    busy_percent: float | None = None
    used_memory_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """A node is about to go, for this reason, in so many seconds."""

    reason: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What an agent reports of its node. `versions` has python, ray, torch, … of its environment, read without torch.

    `storage` is its pool's checkpoint folder; nodes with one `storage_id` see the same one, "" where that is not known.
    `neighbours` are the other pools whose checkpoints it can read.
    `agent_created` is when the process `agent_pid` started, as cluster.processes tells it; "" of an older agent. `use`
    has the accelerators that tell what they do without being opened. `data` names data of jobs that is cached there
    (cluster/content_cache.py), by the first 16 digits of the hash of what it is, and of where it came from.
    """

    node: str
    ray_node_id: str
    host: str
    address: str
    pool: str
    backend: str
    environment: str
    protocol: int
    versions: dict[str, str]
    devices: tuple[Device, ...]
    cpu_count: int
    memory_total_bytes: int
    memory_free_bytes: int
    load_1min: float
    disk_free_bytes: int
    agent_pid: int
    storage: str
    neighbours: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    agent_created: str | float = ""
    notice: Notice | None = None
    storage_id: str = ""
    use: tuple[DeviceUse, ...] = ()
    data: tuple[str, ...] = ()
