"""Join a running Ray cluster as its one driver.

The environment must be set before `import ray`: Ray reads it once.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.errors import FleetError
from cluster.fleet.fleet_record import FleetRecord
from cluster.fleet.identity import fleet_identity, namespace
from cluster.host import ports
from cluster.host.processes import ProcessId
from cluster.nodes import server_node
from cluster.nodes.ray_local import LocalNode
from cluster.nodes.ray_node import SETTINGS, tls_environment, token_environment
from cluster.paths import home

NO_AUTO_CLUSTER = {"RAY_ENABLE_AUTO_CONNECT": "0"}
"""Stops Ray from starting a cluster on this machine for a call that finds none, such as one just after a cluster was
left. That cluster would be open to every local user, and Ray ends this process when that cluster ends. Ray reads the
variable at import.
"""

DRIVER_VARIABLES = NO_AUTO_CLUSTER | {"RAY_gcs_rpc_server_reconnect_timeout_s": "2000000000"}
"""The time-out is unlimited: Ray ends a process that has waited that long for a lost head, even if it has joined a new
one since.

RAY_RAYLET_PID: Ray also ends a process whose message to its raylet fails while "the raylet" is dead; without this
variable it takes the parent process for the raylet (raylet_ipc_client.cc, ShutdownIfLocalRayletDisconnected). A
server's parent has always ended, and disconnecting from a dead head sends such a message. So a process names itself,
which is running.
"""


def prepare(record: FleetRecord) -> None:
    """Set this process's Ray variables for `record`; remove all others, which belong to another cluster."""
    for name in [n for n in os.environ if n.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update({k: v for k, v in SETTINGS.items() if k != "RAY_START_HOOK"})
    os.environ.update(token_environment(Path(record.token_path)) | tls_environment(record.tls_dir))
    os.environ.update(DRIVER_VARIABLES, RAY_RAYLET_PID=str(os.getpid()))
    if (raylet := sys.modules.get("ray._raylet")) is not None:
        raylet.AuthenticationTokenLoader.instance().reset_cache()  # it caches the token of the previous fleet


def connect(record: FleetRecord) -> ProcessId | None:
    """Join the cluster of `record`. `prepare` must have run before anything imported ray.

    Returns the raylet that connects us, if it may end before this process: the cluster must then be joined again.
    Raises FleetError if the head does not respond, or if another user listens at the address of an embedded fleet's
    head.
    """
    if record.is_embedded:
        ports.check_listener(record.address)
    import ray

    from cluster.nodes.ray_start_hook import stay_on_loopback

    is_loopback = record.is_embedded or record.loopback
    if is_loopback:
        stay_on_loopback()
    ray_namespace = namespace(fleet_identity(home()))
    try:
        node = None if is_loopback else server_node.ensure(record)
        with _use_node(node):
            addresses: dict[str, Any] = {"_node_ip_address": node.address if node else record.node_address}
            ray.init(record.address, namespace=ray_namespace, log_to_driver=False, configure_logging=False, **addresses)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as e:
        reason = str(e).strip().splitlines()[0]
        raise FleetError(
            f"no Ray cluster responds at {record.address}: {reason}", "run `polyfleet down`, then `polyfleet up`"
        ) from e
    return node.process if node else None


@contextmanager
def _use_node(node: LocalNode | None) -> Iterator[None]:
    """Make `ray.init` use that node.

    Ray picks any of several at one address, even one this user may not open.
    """
    from ray._private import services

    original = services.get_node_to_connect_for_driver
    if node is not None:
        services.get_node_to_connect_for_driver = lambda *_, **__: node.info
    try:
        yield
    finally:
        services.get_node_to_connect_for_driver = original


def disconnect() -> None:
    import ray

    ray.shutdown()
