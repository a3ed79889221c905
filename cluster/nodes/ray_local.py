"""Find a Ray node of this machine through which a driver can join the cluster.

A driver needs a local node: without one `ray.init` connects, but Ray aborts the process 10 s later (2.60).
"""

import os
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.host.processes import ProcessId, identify

ROLE_LABEL = "polyfleet.io/role"
FLEET_LABEL = "polyfleet.io/fleet"
SERVER = "server"
REPLY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A running node on this machine. `process` is its raylet, `info` Ray's own row for it (GcsNodeInfo)."""

    ray_id: str
    address: str
    process: ProcessId
    is_head: bool
    labels: Mapping[str, str]
    info: Any = None


def find(address: str, fleet: str) -> LocalNode | None:
    """Return a local node of the Ray cluster at `address` that we may use.

    Our own node (server_node.py) is preferred. `connect.prepare` must have run. Raises Ray's own errors if the cluster
    does not respond.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

    alive = GcsNodeInfo.GcsNodeState.ALIVE
    rows = GcsClient(address=address).get_all_node_info(timeout=REPLY_TIMEOUT_S, state_filter=alive).values()
    return choose(local_nodes(rows, addresses_here(), raylets_here()), fleet)


def local_nodes(rows: Iterable[Any], addresses: Collection[str], raylets: Mapping[str, ProcessId]) -> list[LocalNode]:
    """Return the nodes of `rows` at these addresses whose raylet runs here and whose sockets we may open.

    The raylet of a node in a container is not visible here, and the sockets of another user's node cannot be opened.
    """
    return [
        LocalNode(ray_id, row.node_manager_address, raylets[ray_id], row.is_head_node, dict(row.labels), row)
        for row in rows
        if (ray_id := row.node_id.hex()) in raylets
        and row.node_manager_address in addresses
        and all(_may_open(path) for path in (row.raylet_socket_name, row.object_store_socket_name))
    ]


def choose(nodes: Iterable[LocalNode], fleet: str) -> LocalNode | None:
    """Choose a node, but never one that another home's server started: it ends with that server."""
    usable = [n for n in nodes if n.labels.get(ROLE_LABEL) != SERVER or n.labels.get(FLEET_LABEL) == fleet]
    return min(usable, key=lambda n: (n.labels.get(ROLE_LABEL) != SERVER, not n.is_head, n.ray_id), default=None)


def addresses_here() -> frozenset[str]:
    """Return the IP addresses of all interfaces of this machine."""
    rows = (row for rows in psutil.net_if_addrs().values() for row in rows)
    return frozenset(row.address.partition("%")[0] for row in rows if row.family in (socket.AF_INET, socket.AF_INET6))


def raylets_here() -> dict[str, ProcessId]:
    """Return the raylets that run on this machine, by Ray's node id."""
    raylets: dict[str, ProcessId] = {}
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "raylet":
            with suppress(psutil.Error):
                options = [option for option in process.cmdline() if option.startswith("--node_id=")]
                raylets.update((option.partition("=")[2], identify(process.pid)) for option in options)
    return raylets


def _may_open(socket_path: str) -> bool:
    return Path(socket_path).is_socket() and os.access(socket_path, os.R_OK | os.W_OK)


def address_towards(address: str) -> str:
    """Return this machine's own address on the route to HOST:PORT. No packet is sent."""
    host, _, port = address.rpartition(":")
    family, kind, _, _, to = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as s:
        s.connect(to)
        return str(s.getsockname()[0])
