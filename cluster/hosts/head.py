"""A fleet's head on a host: started there over SSH before any node is joined. The fleet's record, its authority and its
token are on this machine, as ever; the server joins through a Ray node of its own (cluster/server_node.py).
"""

import socket
import time
from collections.abc import Callable
from dataclasses import replace

from cluster import embedded, fleet_record, ray_local, tls
from cluster.errors import FleetError, PolyfleetError
from cluster.fleet_record import FleetRecord, HostRecord
from cluster.fleet_spec import FleetSpec
from cluster.hosts import host_steps
from cluster.hosts.fleet import host_record, join_one, leave, request_for
from cluster.hosts.spec import SSHSpec
from cluster.hosts.ssh import Remote
from cluster.hosts.survey import Visit
from cluster.paths import home, umask
from cluster.processes import terminate
from cluster.raylets import new_token, remove_tokens
from cluster.version import VERSION

ANSWER_S = 5.0
Progress = Callable[[str], None]


def up(spec: FleetSpec, visit: Visit, progress: Progress) -> FleetRecord:
    """The record of the fleet, whose head runs on the host of `visit` when this returns. Idempotent. Raises Conflict
    when another fleet is up here, FleetError where the head does not start: nothing is left of it then.
    """
    with embedded.fleet_lock(progress=progress):
        current = fleet_record.read()
        embedded.refuse_other(current, spec)
        host = host_record(visit)
        record = _with_host(current or _new_record(spec), host)
        try:
            return started(record, host, progress)
        except BaseException:
            if current is None:
                leave([host], progress)
                remove_tokens()
                fleet_record.remove()
            raise


def started(record: FleetRecord, host: HostRecord, progress: Progress) -> FleetRecord:
    """With the address at which the head runs now: the last one, where that is free. Of the cluster before, our own
    node here is ended. Raises PolyfleetError.
    """
    request = request_for(record, host) | {"head": "", "port": int(record.address.rpartition(":")[2])}
    remote = Remote(host.host, SSHSpec(**host.ssh))
    address, cluster = host_steps.lead(remote, host.python, host.code, host.home, request, progress)
    if cluster != record.cluster:
        terminate(p.process for p in record.processes)
        record = replace(record, processes=())
    record = replace(record, address=address, cluster=cluster, state="up")
    fleet_record.write(record)
    return record


def join_again(record: FleetRecord, host: HostRecord, progress: Progress) -> None:
    """The head, where it is on that host, and then its nodes. All others join a head that is new. Raises
    PolyfleetError.
    """
    with embedded.fleet_lock(embedded.REPAIR):
        now = fleet_record.read()
        if now is None or now.state != "up":
            raise FleetError("the fleet was taken down meanwhile", "`polyfleet up` again")
        record = started(now, host, progress) if host.name == now.head_host else now
    errors = []
    for one in record.hosts if record.cluster != now.cluster else (host,):
        try:
            if one.nodes:
                join_one(record, one, progress)
        except PolyfleetError as e:
            errors.append(e)
    if errors:
        raise errors[0]


def _with_host(record: FleetRecord, host: HostRecord) -> FleetRecord:
    """Written down before anything starts there: what is there is to be stopped by `down` in any case."""
    others = tuple(one for one in record.hosts if one.name != host.name)
    record = replace(record, hosts=(host, *others))
    fleet_record.write(record)
    return record


def _new_record(spec: FleetSpec) -> FleetRecord:
    remove_tokens()
    own = ray_local.address_towards(f"{spec.head.address}:{spec.head.port or 1}")
    tls.make_authority(home() / "tls-authority")
    tls.make_certificate(home() / "tls-authority", home() / "tls", (own,))
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
        node_address=own,
        tls_dir=str(home() / "tls"),
        head_spec=spec.head.model_dump(mode="json"),
        ssh_spec=spec.ssh.model_dump(mode="json"),
        policy_spec=spec.policy.model_dump(mode="json"),
        projects=embedded.plain_projects(spec),
    )


def answers(record: FleetRecord) -> bool:
    """Whether something listens where the head should."""
    host, _, port = record.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError):
        return False
    return True
