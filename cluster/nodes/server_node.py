"""Ray node beside a server that joins a cluster from a machine without a node of that cluster.

It has no CPUs, and so gets no agent and no work. It is in the fleet's record: `down` stops it, and a server restarts it
if it has ended.
"""

import sys
from dataclasses import replace
from pathlib import Path

from cluster.environments import code_export
from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord, NodeProcess
from cluster.fleet.identity import fleet_identity
from cluster.host.processes import free_port, is_alive
from cluster.nodes import embedded, ray_local
from cluster.nodes.ray_local import FLEET_LABEL, ROLE_LABEL, SERVER, LocalNode
from cluster.nodes.ray_node import node_environment, tls_environment, worker_command
from cluster.nodes.raylets import (
    FOLDER_PREFIX,
    remove_temp_dir,
    start_recorded,
    stop_leftover_processes,
    wait_until_started,
)
from cluster.paths import home, make_short_folder, private_dir

NAME = "server-node"


def ensure(record: FleetRecord) -> LocalNode:
    """Return the local node through which the server joins the cluster of `record`; start it if needed.

    May take half a minute. Raises FleetError, and Ray's own errors if the cluster does not respond.
    """
    identity = fleet_identity(home())
    if (node := ray_local.find(record.address, identity)) is not None:
        return node
    wait_until_started(start(record))
    if (node := ray_local.find(record.address, identity)) is not None:
        return node
    remedy = "check that this user may open sockets in /tmp; `polyfleet doctor` shows whether the next try works"
    raise FleetError(f"the Ray node started on this machine for {record.address} cannot be used", remedy)


def start(record: FleetRecord) -> NodeProcess:
    """Start the node, recorded before it can be lost.

    Raises Conflict while `polyfleet up` or `down` is running.
    """
    with embedded.fleet_lock(embedded.REPAIR_MARK):
        current = fleet_record.read()
        if current is None or current.state != "up" or current.address != record.address:
            raise FleetError(
                f"the fleet left {record.address} before its node was started",
                "run `polyfleet up --address` to join it again",
            )
        if (
            running := next((p for p in current.processes if p.role == SERVER and is_alive(p.process)), None)
        ) is not None:
            return running
        return _start(_with_new_folder(current))


def _with_new_folder(record: FleetRecord) -> FleetRecord:
    """Give the node a new folder; stop and remove what is left of the previous node."""
    if record.joined_dir:
        stop_leftover_processes(Path(record.joined_dir))
        remove_temp_dir(Path(record.joined_dir))
    record = replace(record, joined_dir=str(make_short_folder(FOLDER_PREFIX)))
    fleet_record.write(record)
    return record


def _start(record: FleetRecord) -> NodeProcess:
    folder = Path(record.joined_dir)
    labels = {ROLE_LABEL: SERVER, FLEET_LABEL: fleet_identity(home())}
    own_address = ray_local.address_towards(record.address)
    command = worker_command(Path(sys.executable), record.address, labels, {"CPU": 0})
    command += [f"--node-ip-address={own_address}", f"--temp-dir={folder / 'r'}"]
    ports = {"autoscaler": free_port(), "dashboard": free_port()}
    env = node_environment(Path(record.token_path), code_export.export(), ports, tls_environment(record.tls_dir))
    del env["RAY_START_HOOK"]  # it would keep the node on the loopback interface
    node = NodeProcess(SERVER, NAME, "", 0, 0.0)
    record = start_recorded(record, node, command, env, private_dir(folder / "n"))
    return next(p for p in record.processes if p.role == SERVER)
