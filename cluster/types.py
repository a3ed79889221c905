"""Facts of nodes and devices as frozen dataclasses.

All of them cross Ray as JSON-like data (see cluster/serialization.py).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or all CPUs of a node as one device. It is discovered without being opened.

    `index` is the device's number on its node, as the backend's visibility variable counts. Bytes are None if
    unknown. `integrated` graphics are part of a CPU; with `unified_memory` the device uses the machine's own memory.
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
    """A line of `doctor`: its level (`info`, `warning`, `error`), the subject, a message and what to do."""

    level: str
    subject: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Metrics of the device `index` of a back end at one moment, by name; None for one that it does not measure.

    Their names are in cluster/catalogue/device_metrics.py.
    """

    backend: str
    index: int
    metrics: dict[str, int | float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Notice:
    """Termination notice: the node is about to stop, for this reason, in `deadline_s` seconds."""

    reason: str
    deadline_s: float


class HostAddress(NamedTuple):
    """A machine on the network, by its host name and one address of it."""

    host: str
    address: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts of a node, as its agent sends them.

    `versions` has python, ray, torch, … of its environment, read without importing torch.
    `storage` is its pool's checkpoint folder; nodes with one `storage_id` share the folder, "" means unknown.
    `object_store` is the URI to which checkpoints and files of jobs in `storage` are uploaded, "" for none;
    `pending_uploads` counts checkpoints and jobs whose upload is not complete.
    `neighbours` are the other pools whose checkpoints it can read.
    `agent_created` is when the process `agent_pid` started, as cluster.host.processes reads it.
    `use` lists the accelerators whose load can be read without opening them.
    `data` lists the jobs' data cached on the node (cluster/host/content_cache.py), by the first 16 digits of the hashes
    of its content and of its source.
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
    object_store: str = ""
    use: tuple[DeviceUse, ...] = ()
    data: tuple[str, ...] = ()
    pending_uploads: int = 0
