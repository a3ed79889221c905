"""The head of an embedded fleet: started, started again on its own storage, or replaced where that is gone.

Nodes wait ten minutes for their head (RAY_gcs_rpc_server_reconnect_timeout_s), and agents are asked without it: one
that comes back at its address with its storage finds both as they were. A new head has a new cluster, which nodes of
the old one cannot join: they are killed and started again, and their new agents adopt the attempts, whose supervisors
are no part of Ray.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cluster import fleet_record
from cluster.errors import FleetError
from cluster.fleet_record import FleetRecord, NodeProcess
from cluster.paths import home
from cluster.processes import free_port, terminate
from cluster.ray_node import head_command
from cluster.raylets import (
    new_temporary,
    new_token,
    remove_temp_dir,
    remove_tokens,
    start_node,
    stop_leftover_processes,
    wait_until_started,
)

Progress = Callable[[str], None]
HEAD = "head"
STORAGE = "gcs"
STORED = "session_name"
"""The file of Ray's storage without which it holds no cluster (ray._private.node.Node, 2.60)."""
LAST_ADDRESS = "ray_current_cluster"
"""Ray starts no head at the address that stands there while a node of this machine still names it."""


class StorageLost(FleetError):
    """Of a head on a host: nobody there can give the others a new one."""


def storage(record: FleetRecord) -> Path:
    """The cluster's state in RocksDB. On a host it outlives a restart of the machine: others wait for that head."""
    return (home() if record.host else Path(record.temp_dir)) / STORAGE


def new_cluster_record(record: FleetRecord) -> FleetRecord:
    """The same fleet without a process yet, at an address and in a folder of its own; written down."""
    temp_dir = new_temporary()
    address = f"{record.node_address}:{record.head_spec.get('port') or free_port()}"
    new = replace(record, state="starting", address=address, temp_dir=temp_dir, processes=())
    try:
        fleet_record.write(new)
    except OSError:
        Path(temp_dir).rmdir()
        raise
    return new


def start(record: FleetRecord) -> FleetRecord:
    """Raises FleetError when it does not start."""
    port = int(record.address.rpartition(":")[2])
    command = head_command(Path(sys.executable), port, record.ray_dir)
    state = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(storage(record))}
    record = start_node(record, NodeProcess(HEAD, HEAD, "", 0, 0.0), command, state)
    wait_until_started(next(p for p in record.processes if p.role == HEAD))
    return record


def restart(record: FleetRecord, progress: Progress) -> FleetRecord:
    """Give a fleet whose head has ended its head again: in the same Ray cluster where that can be, else in a new one,
    for which nodes are to be started before `abandon`. No attempt ends by this. Raises FleetError.
    """
    record = kill_previous_nodes(record)
    if record.host and not (storage(record) / STORED).is_file():
        told = f"the head's storage on host {record.host} is lost"
        raise StorageLost(told, "`polyfleet up` starts a new head, and the hosts join it")
    terminate(p.process for p in record.processes if p.role == HEAD)
    if (storage(record) / STORED).is_file():
        try:
            return _same_cluster(record, progress)
        except FleetError as e:
            if record.host:
                raise  # the other hosts wait for this one, and nobody here can give them another
            progress(f"Ray's head could not restart from its storage; starting a new head: {e.message}")
    return _new_cluster(record, progress)


def _same_cluster(record: FleetRecord, progress: Progress) -> FleetRecord:
    progress("starting the head again")
    stop_leftover_processes(record.cwd(HEAD))
    (record.ray_dir / LAST_ADDRESS).unlink(missing_ok=True)
    return start(record)


def _new_cluster(record: FleetRecord, progress: Progress) -> FleetRecord:
    """With a token of its own: nodes have sent the old one to the old address, whoever listened there. It is `up` once
    it has its nodes: who joins it before would take them for lost.

    When it fails, the record is as it was, without a head.
    """
    progress("starting a new head")
    token = new_token()
    try:
        return start(new_cluster_record(replace(record, before=record.temp_dir, token_path=str(token))))
    except BaseException:
        if (begun := fleet_record.read()) is not None and begun.temp_dir != record.temp_dir:
            _remove(Path(begun.temp_dir))
        token.unlink(missing_ok=True)
        fleet_record.write(replace(record, processes=tuple(p for p in record.processes if p.role != HEAD)))
        raise


def kill_previous_nodes(record: FleetRecord) -> FleetRecord:
    """Kill the nodes of the cluster before, which no head looks after, without a word that would make their attempts
    end. Until then they live beside the new ones: their agents renew the leases of the attempts.
    """
    if not record.before:
        return record
    _remove(Path(record.before))
    remove_tokens(but=record.token_path)
    terminate(p.process for p in record.processes)
    record = replace(record, before="")
    fleet_record.write(record)
    return record


def _remove(folder: Path) -> None:
    stop_leftover_processes(folder)
    remove_temp_dir(folder)
