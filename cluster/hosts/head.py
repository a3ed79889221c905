"""Start a fleet's head on a host over SSH, before any node joins.

The fleet's record, certificate authority and token stay on this machine; the server joins through a Ray node of its own
(cluster/nodes/server_node.py).
"""

import socket
import time
from collections.abc import Callable
from dataclasses import replace

from cluster.errors import FleetError, PolyfleetError
from cluster.fleet import fleet_record, tls
from cluster.fleet.fleet_record import FleetRecord, HostRecord
from cluster.fleet.fleet_spec import FleetSpec
from cluster.fleet.host_spec import SSHSpec
from cluster.host.processes import reap
from cluster.hosts import host_steps
from cluster.hosts.fleet import host_record, join_host, leave, request_for
from cluster.hosts.ssh import Remote
from cluster.hosts.survey import HostState
from cluster.nodes import embedded, ray_local
from cluster.nodes.raylets import new_token, remove_tokens
from cluster.paths import home, umask
from cluster.version import VERSION

CONNECT_TIMEOUT_S = 5.0
Progress = Callable[[str], None]


def up(spec: FleetSpec, visit: HostState, progress: Progress) -> FleetRecord:
    """Start the fleet's head on the host of `visit`, and return the fleet's record. Idempotent.

    Raises Conflict if another fleet is up here, and FleetError if the head does not start: then nothing is left of it.
    """
    with embedded.fleet_lock(progress=progress):
        current = fleet_record.read()
        embedded.check_same_fleet(current, spec)
        host = host_record(visit)
        record = _with_host(embedded.with_spec(current, spec) if current else _new_record(spec), host)
        try:
            return start(record, host, progress)
        except BaseException:
            if current is None:
                leave([host], progress)
                remove_tokens()
                fleet_record.remove()
            raise


def start(record: FleetRecord, host: HostRecord, progress: Progress) -> FleetRecord:
    """Start the head, at its last address if that is free, and return the updated record.

    If the cluster is a new one, our own node of the previous cluster on this machine is ended. Raises PolyfleetError.
    """
    request = request_for(record, host) | {"head": "", "port": int(record.address.rpartition(":")[2])}
    remote = Remote(host.host, SSHSpec(**host.ssh))
    address, cluster = host_steps.start_head(remote, host.python, host.code, host.home, request, progress)
    if cluster != record.cluster:
        reap(p.process for p in record.processes)
        record = replace(record, processes=())
    record = replace(record, address=address, cluster=cluster, state="up")
    fleet_record.write(record)
    return record


def rejoin(record: FleetRecord, host: HostRecord, progress: Progress) -> None:
    """Join a host again: first the head, if it is on that host, then its nodes. All hosts join a new head.

    Raises PolyfleetError.
    """
    with embedded.fleet_lock(embedded.REPAIR_MARK):
        current = fleet_record.read()
        if current is None or current.state != "up":
            raise FleetError("`polyfleet down` stopped the fleet before the host rejoined", "run `polyfleet up` again")
        record = start(current, host, progress) if host.name == current.head_host else current
    errors = []
    for joining in record.hosts if record.cluster != current.cluster else (host,):
        try:
            if joining.nodes:
                join_host(record, joining, progress)
        except PolyfleetError as e:
            errors.append(e)
    if errors:
        raise errors[0]


def _with_host(record: FleetRecord, host: HostRecord) -> FleetRecord:
    """Record the host before anything starts there, so that `down` stops it in any case."""
    other_hosts = tuple(other for other in record.hosts if other.name != host.name)
    record = replace(record, hosts=(host, *other_hosts))
    fleet_record.write(record)
    return record


def _new_record(spec: FleetSpec) -> FleetRecord:
    remove_tokens()
    own_address = ray_local.address_towards(f"{spec.head.address}:{spec.head.port or 1}")
    tls.make_authority(home() / "tls-authority")
    tls.make_certificate(home() / "tls-authority", home() / "tls", (own_address,))
    return FleetRecord(
        name=spec.name,
        state="starting",
        address=f"{spec.head.address}:{spec.head.port}",
        version=VERSION,
        started_s=time.time(),
        token_path=str(new_token()),
        loopback=False,
        pools=embedded.plain_pools(spec),
        umask=umask(),
        node_address=own_address,
        tls_dir=str(home() / "tls"),
        head_spec=spec.head.model_dump(mode="json"),
        ssh_spec=spec.ssh.model_dump(mode="json"),
        policy_spec=spec.scheduler.settings(),
        projects=embedded.plain_projects(spec),
    )


def is_listening(record: FleetRecord) -> bool:
    """Return whether a process listens at the head's address."""
    host, _, port = record.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError):
        return False
    return True
