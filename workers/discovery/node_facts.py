"""What an agent tells of its node, put together from discovery, psutil and the environment variables of its pool."""

import json
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.catalogue import vendor
from cluster.identity import storage_identity
from cluster.paths import home
from cluster.processes import start_of
from cluster.types import Device, Finding, NodeFacts
from workers.discovery import discover
from workers.discovery.machine import Machine
from workers.discovery.resource_limits import cores, memory
from workers.discovery.versions import versions
from workers.messages import PROTOCOL

LOW_DISK_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Where an agent works: the words of its pool and its two folders.

    `neighbours` are the storages of other pools that this machine can read, by pool. `fleet` is the identity of the
    fleet that it serves, "" for none.
    """

    node: str
    pool: str
    backend: str
    environment: str
    node_dir: Path
    storage: Path
    neighbours: dict[str, Path]
    fleet: str = ""


def node_identity(
    node: str | None,
    pool: str | None,
    backend: str | None,
    node_dir: Path | None,
    storage: Path | None,
    fleet: str | None = None,
) -> NodeIdentity:
    """Arguments first, then the POLYFLEET_… variables of an embedded node, then what is found here.

    An agent of another fleet than the node's own has a folder of its own in that of the node.
    """
    env = os.environ
    owner = env.get("POLYFLEET_FLEET", "")
    serves = fleet or owner
    chosen = backend or env.get("POLYFLEET_BACKEND") or detected_backend()
    in_pool = pool or env.get("POLYFLEET_POOL") or chosen
    called = node or env.get("POLYFLEET_NODE") or socket.gethostname()
    node_folder = Path(env.get("POLYFLEET_NODE_DIR") or home() / "nodes" / called)
    return NodeIdentity(
        node=called,
        pool=in_pool,
        backend=chosen,
        environment=env.get("POLYFLEET_ENVIRONMENT") or vendor(chosen).environment or chosen,
        fleet=serves,
        node_dir=node_dir or (node_folder if serves == owner else node_folder / "fleets" / serves),
        storage=storage or Path(env.get("POLYFLEET_STORAGE") or home() / "storage" / in_pool),
        neighbours={name: Path(path) for name, path in json.loads(env.get("POLYFLEET_NEIGHBOURS") or "{}").items()},
    )


def detected_backend() -> str:
    """The first accelerator of this machine that can be used, else the CPU."""
    devices, _ = discover()
    usable = [d.backend for d in devices if d.backend != "cpu" and not d.unavailable_reason and not d.emulated]
    return usable[0] if usable else "cpu"


def node_facts(
    place: NodeIdentity,
    devices: tuple[Device, ...],
    findings: tuple[Finding, ...],
    ray_node_id: str = "",
    address: str = "127.0.0.1",
) -> NodeFacts:
    """Cheap: load, memory and disk are read now, `devices` and `findings` are those of the last discovery."""
    machine = Machine()
    total, free = memory(machine)
    disk_free = shutil.disk_usage(place.storage).free
    return NodeFacts(
        node=place.node,
        ray_node_id=ray_node_id,
        host=socket.gethostname(),
        address=address,
        pool=place.pool,
        backend=place.backend,
        environment=place.environment,
        protocol=PROTOCOL,
        versions=versions(),
        devices=devices,
        cpu_count=cores(machine),
        memory_total_bytes=total,
        memory_free_bytes=free,
        load_1min=psutil.getloadavg()[0],
        disk_free_bytes=disk_free,
        agent_pid=os.getpid(),
        storage=str(place.storage),
        neighbours=tuple(place.neighbours),
        findings=findings + _disk(place.storage, disk_free),
        agent_created=start_of(os.getpid()),
        storage_id=storage_identity(place.storage),
    )


def _disk(storage: Path, free_bytes: int) -> tuple[Finding, ...]:
    if free_bytes >= LOW_DISK_BYTES:
        return ()
    return (
        Finding(
            "warning", "disk", f"{free_bytes / 2**30:.1f} GiB free at {storage}", "checkpoints need space: free some"
        ),
    )
