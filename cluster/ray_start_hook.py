"""What Ray does otherwise in a node of an embedded fleet: it stays on the loopback interface, and a node that is told
to end lets its attempts save first.

`ray start --node-ip-address 127.0.0.1`, `--address 127.0.0.1:PORT` and `ray.init` all replace the loopback address by
the machine's own and then listen on, or connect through, every interface (Ray 2.60, services.resolve_ip_for_localhost).
"""

import os
import time
from pathlib import Path
from typing import Any

from cluster import termination_notice

SOCKETS = "POLYFLEET_SOCKETS"
"""Path prefix of a node's Unix sockets."""
NODE_DIR = "POLYFLEET_NODE_DIR"
ADDRESS = "POLYFLEET_NODE_ADDRESS"
"""IP address of this machine on which the node is to be reached; loopback where it is not set."""
TOLD_TO_END = "the node was told to end (SIGTERM)"
DRAIN_LIMIT_S = 2.0


def stay_on_loopback() -> None:
    """Take Ray's word-for-word: 127.0.0.1 means 127.0.0.1, in this process, from now on."""
    from ray._private import services

    services.resolve_ip_for_localhost = lambda host: host


def prepare_node(params: Any, head: bool) -> None:
    """RAY_START_HOOK of every embedded node, called before it opens a port.

    `params` is ray._private.parameter.RayParams. The client server (port 10001), which we do not use, stays off. Nodes
    of one machine that start together would pick the same free socket names, so each is given its own.
    """
    stay_on_loopback()
    params.node_ip_address = os.environ.get(ADDRESS, "127.0.0.1")
    params.ray_client_server_port = None
    if sockets := os.environ.get(SOCKETS):
        params.raylet_socket_name = _fresh(f"{sockets}.raylet")
        params.plasma_store_socket_name = _fresh(f"{sockets}.store")
    if (folder := os.environ.get(NODE_DIR)) and not head:
        install_shutdown_hook(Path(folder))


def prepare_node_of_an_engine(params: Any, head: bool) -> None:
    """RAY_START_HOOK of nodes that KubeRay, Ray's launcher or Slurm start from a rendered file (cluster/render): on the
    address they chose, without the client server (port 10001).
    """
    params.ray_client_server_port = None
    if (folder := os.environ.get(NODE_DIR)) and not head:
        install_shutdown_hook(Path(folder))


def install_shutdown_hook(folder: Path) -> None:
    """From now on, SIGTERM to this process writes the node's notice and waits for its attempts before Ray ends.

    In place of Ray's own draining, which waits 30 s for a node that is never idle: its agent always runs.
    """
    from ray._private.node import Node

    def wait(node: Any) -> None:
        termination_notice.notify_and_wait(folder, TOLD_TO_END, lambda grace_s: _drain(node, grace_s))

    Node._drain_node_before_shutdown = wait  # type: ignore[method-assign]


def _drain(node: Any, grace_s: float) -> None:
    """Tell Ray's head, whose other users see it too. Where it does not answer, the notice has to do."""
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

    reason, deadline_ms = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, int((time.time() + grace_s) * 1000)
    try:
        node.get_gcs_client().drain_node(node.node_id, reason, TOLD_TO_END, deadline_ms, timeout=DRAIN_LIMIT_S)
    except Exception as e:
        print(f"Ray's head was not told: {e}", flush=True)  # noqa: T201 - into the node's log


def _fresh(socket: str) -> str:
    """Without the file that a killed node left: nobody can bind to it."""
    Path(socket).unlink(missing_ok=True)
    return socket
