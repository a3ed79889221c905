"""Joining a running Ray cluster as its one driver. The environment must be right before `import ray`: Ray reads it
once.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import ports, server_node
from cluster.errors import FleetError
from cluster.fleet_record import FleetRecord
from cluster.identity import fleet_identity, namespace
from cluster.paths import home
from cluster.processes import ProcessId
from cluster.ray_local import LocalNode
from cluster.ray_node import SETTINGS, tls_environment, token_environment

NO_CLUSTER_OF_ITS_OWN = {"RAY_ENABLE_AUTO_CONNECT": "0"}
"""Else Ray starts a cluster on this machine, open to everybody here, for a call that finds none, as one that comes just
after a cluster was left, and ends this process when that cluster ends. Ray reads it when it is imported.
"""

OF_A_DRIVER = NO_CLUSTER_OF_ITS_OWN | {"RAY_gcs_rpc_server_reconnect_timeout_s": "2000000000"}
"""The time is without end: Ray ends a process that waited so long for a head that is gone, even if it has joined
another since.

RAY_RAYLET_PID: Ray also ends a process whose message to its raylet fails while "the raylet" is dead, and takes the
parent for it where none is named (raylet_ipc_client.cc, ShutdownIfLocalRayletDisconnected). A server's parent is gone
from the start, and parting from a dead head sends such a message. So a process names itself, which lives.
"""


def prepare(record: FleetRecord) -> None:
    """Set this process's Ray variables for `record`, and drop all others: they would belong to another cluster."""
    for name in [n for n in os.environ if n.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update({k: v for k, v in SETTINGS.items() if k != "RAY_START_HOOK"})
    os.environ.update(token_environment(Path(record.token_path)) | tls_environment(record.tls_dir))
    os.environ.update(OF_A_DRIVER, RAY_RAYLET_PID=str(os.getpid()))
    if (raylet := sys.modules.get("ray._raylet")) is not None:
        raylet.AuthenticationTokenLoader.instance().reset_cache()  # it keeps the token of the fleet before


def connect(record: FleetRecord) -> ProcessId | None:
    """Join. `prepare` must have run, before anything imported ray. Returns the raylet we work through, where it may end
    without us: then the cluster has to be joined again. Raises FleetError when the head does not answer, and when
    another user listens where the head of an embedded fleet should.
    """
    if record.embedded:
        ports.check_listener(record.address)
    import ray

    from cluster.ray_start_hook import stay_on_loopback

    named = record.embedded or record.loopback
    if named:
        stay_on_loopback()
    ours = namespace(fleet_identity(home()))
    try:
        node = None if named else server_node.ensure(record)
        with _through(node):
            where: dict[str, Any] = {"_node_ip_address": node.address if node else record.node_address}
            ray.init(record.address, namespace=ours, log_to_driver=False, configure_logging=False, **where)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as e:
        reason = str(e).strip().splitlines()[0]
        raise FleetError(
            f"no Ray cluster answers at {record.address}: {reason}", "`polyfleet down`, then `polyfleet up`"
        ) from e
    return node.process if node else None


@contextmanager
def _through(node: LocalNode | None) -> Iterator[None]:
    """Have `ray.init` use that node. Of several at one address Ray would take any, also one it must not open."""
    from ray._private import services

    chosen = services.get_node_to_connect_for_driver
    if node is not None:
        services.get_node_to_connect_for_driver = lambda *_, **__: node.info
    try:
        yield
    finally:
        services.get_node_to_connect_for_driver = chosen


def disconnect() -> None:
    import ray

    ray.shutdown()
