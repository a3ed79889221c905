"""Facts that an agent reports about its node, from discovery, psutil and the environment variables of its pool."""

import json
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.catalogue import vendor
from cluster.fleet.identity import storage_identity
from cluster.host.processes import start_of
from cluster.paths import home
from cluster.types import Device, Finding, NodeFacts
from workers.devices.discovery import discover
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.resource_limits import cores, memory
from workers.devices.discovery.versions import versions
from workers.protocol.messages import PROTOCOL

LOW_DISK_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Names and folders of an agent's node.

    `neighbours` are the storages of other pools that this machine can read, by pool. `fleet` is the identity of the
    fleet that the agent serves, "" for none. `object_store` is the URI to which checkpoints and files of jobs in
    `storage` are uploaded, "" for none.
    """

    node: str
    pool: str
    backend: str
    environment: str
    node_dir: Path
    storage: Path
    neighbours: dict[str, Path]
    fleet: str = ""
    object_store: str = ""


def node_identity(
    node: str | None,
    pool: str | None,
    backend: str | None,
    node_dir: Path | None,
    storage: Path | None,
    fleet: str | None = None,
) -> NodeIdentity:
    """Determine the identity from the arguments, else the POLYFLEET_… variables of an embedded node, else this machine.

    An agent that serves a fleet other than the node's own uses a subfolder of the node's folder.
    """
    env = os.environ
    owner = env.get("POLYFLEET_FLEET", "")
    served_fleet = fleet or owner
    resolved_backend = backend or env.get("POLYFLEET_BACKEND") or detected_backend()
    resolved_pool = pool or env.get("POLYFLEET_POOL") or resolved_backend
    resolved_node = node or env.get("POLYFLEET_NODE") or socket.gethostname()
    node_folder = Path(env.get("POLYFLEET_NODE_DIR") or home() / "nodes" / resolved_node)
    return NodeIdentity(
        node=resolved_node,
        pool=resolved_pool,
        backend=resolved_backend,
        environment=env.get("POLYFLEET_ENVIRONMENT") or vendor(resolved_backend).environment or resolved_backend,
        fleet=served_fleet,
        node_dir=node_dir or (node_folder if served_fleet == owner else node_folder / "fleets" / served_fleet),
        storage=storage or Path(env.get("POLYFLEET_STORAGE") or home() / "storage" / resolved_pool),
        object_store=env.get("POLYFLEET_OBJECT_STORE", ""),
        neighbours={name: Path(path) for name, path in json.loads(env.get("POLYFLEET_LOCAL_POOLS") or "{}").items()},
    )


def detected_backend() -> str:
    """Backend of the first usable accelerator of this machine, else `cpu`."""
    devices, _ = discover()
    usable = [d.backend for d in devices if d.backend != "cpu" and not d.unavailable_reason and not d.emulated]
    return usable[0] if usable else "cpu"


def node_facts(
    identity: NodeIdentity,
    devices: tuple[Device, ...],
    findings: tuple[Finding, ...],
    ray_node_id: str = "",
    address: str = "127.0.0.1",
) -> NodeFacts:
    """Collect the node's facts. Fast: `devices` and `findings` are those of the last discovery."""
    machine = Machine()
    total, free = memory(machine)
    disk_free = shutil.disk_usage(identity.storage).free
    return NodeFacts(
        node=identity.node,
        ray_node_id=ray_node_id,
        host=socket.gethostname(),
        address=address,
        pool=identity.pool,
        backend=identity.backend,
        environment=identity.environment,
        protocol=PROTOCOL,
        versions=versions(),
        devices=devices,
        cpu_count=cores(machine),
        memory_total_bytes=total,
        memory_free_bytes=free,
        load_1min=psutil.getloadavg()[0],
        disk_free_bytes=disk_free,
        agent_pid=os.getpid(),
        storage=str(identity.storage),
        neighbours=tuple(identity.neighbours),
        findings=findings + _disk(identity.storage, disk_free),
        agent_created=start_of(os.getpid()),
        storage_id=storage_identity(identity.storage),
        object_store=identity.object_store,
    )


def _disk(storage: Path, free_bytes: int) -> tuple[Finding, ...]:
    if free_bytes >= LOW_DISK_BYTES:
        return ()
    return (
        Finding(
            "warning",
            "disk",
            f"{free_bytes / 2**30:.1f} GiB free at {storage}",
            "free disk space: checkpoints need it",
        ),
    )
