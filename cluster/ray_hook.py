"""Keeps an embedded fleet's Ray on the loopback interface.

`ray start --node-ip-address 127.0.0.1`, `--address 127.0.0.1:PORT` and `ray.init` all replace the loopback address by
the
machine's own and then listen on, or connect through, every interface (Ray 2.60, services.resolve_ip_for_localhost).
"""

import os
from pathlib import Path
from typing import Any

SOCKETS = "POLYFLEET_SOCKETS"
"""Path prefix of a node's Unix sockets."""


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
    params.node_ip_address = "127.0.0.1"
    params.ray_client_server_port = None
    if sockets := os.environ.get(SOCKETS):
        params.raylet_socket_name = _fresh(f"{sockets}.raylet")
        params.plasma_store_socket_name = _fresh(f"{sockets}.store")


def _fresh(socket: str) -> str:
    """Without the file that a killed node left: nobody can bind to it."""
    Path(socket).unlink(missing_ok=True)
    return socket
