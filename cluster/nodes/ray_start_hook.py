"""Changes to Ray in the fleet's nodes: stay on loopback, and let attempts save before the node ends.

`ray start --node-ip-address 127.0.0.1`, `--address 127.0.0.1:PORT` and `ray.init` all replace the loopback address by
the machine's own and then listen on, or connect through, every interface (Ray 2.60, services.resolve_ip_for_localhost).
"""

import os
import time
from pathlib import Path
from typing import Any

from cluster.host import termination_notice

SOCKETS = "POLYFLEET_SOCKETS"
"""Path prefix of a node's Unix sockets."""
NODE_DIR = "POLYFLEET_NODE_DIR"
ADDRESS = "POLYFLEET_NODE_ADDRESS"
"""IP address of this machine at which other nodes reach the node; loopback if it is not set."""
RECEIVED_SIGTERM = "the node received SIGTERM"
DRAIN_LIMIT_S = 2.0


def stay_on_loopback() -> None:
    """Make Ray use 127.0.0.1 as it is, in this process, from now on."""
    from ray._private import services

    services.resolve_ip_for_localhost = lambda host: host


def prepare_node(params: Any, head: bool) -> None:
    """Prepare a node of an embedded fleet. This is its RAY_START_HOOK, called before it opens a port.

    `params` is ray._private.parameter.RayParams. The client server (port 10001), which we do not use, stays off. Nodes
    of one machine that start together would pick the same free socket names, so each gets its own.
    """
    stay_on_loopback()
    params.node_ip_address = os.environ.get(ADDRESS, "127.0.0.1")
    params.ray_client_server_port = None
    if sockets := os.environ.get(SOCKETS):
        params.raylet_socket_name = _remove_stale_socket(f"{sockets}.raylet")
        params.plasma_store_socket_name = _remove_stale_socket(f"{sockets}.store")
    if (folder := os.environ.get(NODE_DIR)) and not head:
        install_shutdown_hook(Path(folder))


def prepare_node_of_an_engine(params: Any, head: bool) -> None:
    """Prepare a node that KubeRay, Ray's launcher or Slurm starts from a rendered file (cluster/render).

    This is its RAY_START_HOOK. The node keeps the address that the engine chose; the client server (port 10001) is off.
    """
    params.ray_client_server_port = None
    if (folder := os.environ.get(NODE_DIR)) and not head:
        install_shutdown_hook(Path(folder))


def install_shutdown_hook(folder: Path) -> None:
    """On SIGTERM, write the node's notice and wait for its attempts before Ray ends the node.

    This replaces Ray's own draining, which waits 30 s for the node to become idle: it never does, as its agent always
    runs.
    """
    from ray._private.node import Node

    def wait(node: Any) -> None:
        termination_notice.notify_and_wait(folder, RECEIVED_SIGTERM, lambda grace_s: _drain(node, grace_s))

    Node._drain_node_before_shutdown = wait  # type: ignore[method-assign]


def _drain(node: Any, grace_s: float) -> None:
    """Notify Ray's head of the draining, for the cluster's other users.

    If the head does not respond, the notice on this node suffices.
    """
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

    reason, deadline_ms = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, int((time.time() + grace_s) * 1000)
    try:
        node.get_gcs_client().drain_node(node.node_id, reason, RECEIVED_SIGTERM, deadline_ms, timeout=DRAIN_LIMIT_S)
    except Exception as e:
        print(f"the node could not notify Ray's head that it ends: {e}", flush=True)  # noqa: T201 - in the node's log


def _remove_stale_socket(socket: str) -> str:
    """Remove the socket file that a killed node left: binding to it would fail."""
    Path(socket).unlink(missing_ok=True)
    return socket
