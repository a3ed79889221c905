"""Start an embedded fleet's head, restart it from its storage, or replace it if the storage is lost.

Nodes wait ten minutes for their head (RAY_gcs_rpc_server_reconnect_timeout_s), and agents work without it: a head
that restarts at its address with its storage still has both. A new head has a new cluster, which nodes of the old one
cannot join: they are killed and started again, and their new agents adopt the attempts, whose supervisors are not
part of Ray.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord, NodeProcess
from cluster.host.processes import free_port, reap
from cluster.nodes.ray_node import head_command
from cluster.nodes.raylets import (
    new_temporary_folder,
    new_token,
    remove_temp_dir,
    remove_tokens,
    start_node,
    stop_leftover_processes,
    wait_until_started,
)
from cluster.paths import home

Progress = Callable[[str], None]
HEAD = "head"
STORAGE = "gcs"
STORAGE_MARK = "session_name"
"""File of Ray's storage; without it the storage contains no cluster (ray._private.node.Node, 2.60)."""
LAST_ADDRESS = "ray_current_cluster"
"""Ray's file with the address of the last head. While it names an address that a node of this machine still uses, Ray
starts no head there.
"""


class StorageLost(FleetError):
    """The storage of a head on a host is lost.

    The host cannot give the other hosts a new head: `polyfleet up` has to.
    """


def storage(record: FleetRecord) -> Path:
    """Return the folder of the cluster's state (RocksDB).

    On a host it outlives a restart of the machine, because the other hosts wait for that head.
    """
    return (home() if record.host else Path(record.temp_dir)) / STORAGE


def new_cluster_record(record: FleetRecord) -> FleetRecord:
    """Write and return a record of the same fleet with a new address and folder, and no process yet."""
    temp_dir = new_temporary_folder()
    address = f"{record.node_address}:{record.head_spec.get('port') or free_port()}"
    new = replace(record, state="starting", address=address, temp_dir=temp_dir, processes=())
    try:
        fleet_record.write(new)
    except OSError:
        Path(temp_dir).rmdir()
        raise
    return new


def start(record: FleetRecord) -> FleetRecord:
    """Start the head and wait until it runs. Raises FleetError if it does not start."""
    port = int(record.address.rpartition(":")[2])
    command = head_command(Path(sys.executable), port, record.ray_dir)
    state = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(storage(record))}
    record = start_node(record, NodeProcess(HEAD, HEAD, "", 0, 0.0), command, state)
    wait_until_started(next(p for p in record.processes if p.role == HEAD))
    return record


def restart(record: FleetRecord, progress: Progress) -> FleetRecord:
    """Restart the head of a fleet, in the same Ray cluster if possible, else in a new one.

    No attempt ends by this.

    For a new cluster the caller starts the nodes and then calls `kill_previous_nodes`. Raises FleetError.
    """
    record = kill_previous_nodes(record)
    if record.host and not (storage(record) / STORAGE_MARK).is_file():
        message = f"the head's storage on host {record.host} is lost"
        raise StorageLost(message, "run `polyfleet up`: it starts a new head, and the hosts join it")
    reap(p.process for p in record.processes if p.role == HEAD)
    if (storage(record) / STORAGE_MARK).is_file():
        try:
            return _same_cluster(record, progress)
        except FleetError as e:
            if record.host:
                raise  # the other hosts wait for this head, and this host cannot give them another
            progress(f"Ray's head could not restart from its storage; starting a new head: {e.message}")
    return _new_cluster(record, progress)


def _same_cluster(record: FleetRecord, progress: Progress) -> FleetRecord:
    progress("restarting the head")
    stop_leftover_processes(record.cwd(HEAD))
    (record.ray_dir / LAST_ADDRESS).unlink(missing_ok=True)
    return start(record)


def _new_cluster(record: FleetRecord, progress: Progress) -> FleetRecord:
    """Start a head with a new cluster and a new token.

    The old token may have leaked: nodes sent it to any process that listened at the old address. The record's state
    becomes `up` only once it has its nodes: a server that joined earlier would count them as lost. If this fails, the
    record is as before, without a head.
    """
    progress("starting a new head")
    token = new_token()
    try:
        return start(new_cluster_record(replace(record, previous_temp_dir=record.temp_dir, token_path=str(token))))
    except BaseException:
        if (failed := fleet_record.read()) is not None and failed.temp_dir != record.temp_dir:
            _remove(Path(failed.temp_dir))
        token.unlink(missing_ok=True)
        fleet_record.write(replace(record, processes=tuple(p for p in record.processes if p.role != HEAD)))
        raise


def kill_previous_nodes(record: FleetRecord) -> FleetRecord:
    """Kill the nodes of the previous cluster, which has no head any more.

    They get no notice, which would end their attempts. Until then they run beside the new nodes, because their agents
    renew the leases of the attempts.
    """
    if not record.previous_temp_dir:
        return record
    _remove(Path(record.previous_temp_dir))
    remove_tokens(but=record.token_path)
    reap(p.process for p in record.processes)
    record = replace(record, previous_temp_dir="")
    fleet_record.write(record)
    return record


def _remove(folder: Path) -> None:
    stop_leftover_processes(folder)
    remove_temp_dir(folder)
