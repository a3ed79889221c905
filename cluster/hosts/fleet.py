"""Join and leave the hosts of a fleet that is up. One thread per host, one SSH connection per step."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cluster.errors import PolyfleetError
from cluster.fleet import identity, tls
from cluster.fleet.fleet_record import FleetRecord, HostRecord
from cluster.fleet.host_spec import SSHSpec
from cluster.host import tokens
from cluster.hosts import host_steps, pending_stops
from cluster.hosts.ssh import Remote
from cluster.hosts.survey import HostState, map_in_threads
from cluster.nodes import embedded
from cluster.paths import home

Progress = Callable[[str], None]


def join(visits: list[HostState], progress: Progress) -> list[HostState]:
    """Start the nodes of every host. A host is recorded before anything starts there.

    Errors are in the visits.
    """
    joining = {visit.name: host_record(visit) for visit in visits}
    record = embedded.record_hosts(joining)

    def joined(visit: HostState) -> HostState:
        try:
            join_host(record, joining[visit.name], progress)
        except PolyfleetError as e:
            return visit.with_error(e)
        progress(f"host {visit.request.host}: {', '.join(visit.nodes)} joined")
        return visit

    return map_in_threads(visits, joined)


def join_host(record: FleetRecord, host: HostRecord, progress: Progress) -> None:
    """Start the nodes of a host that are not running; none if all are. Raises PolyfleetError."""
    remote = Remote(host.host, SSHSpec(**host.ssh))
    host_steps.join(remote, host.python, host.code, host.home, request_for(record, host), progress)


def host_record(visit: HostState) -> HostRecord:
    assert visit.facts is not None
    return HostRecord(
        name=visit.name,
        host=visit.request.host,
        address=visit.request.address,
        ssh=visit.remote.ssh.model_dump(mode="json"),
        nodes=visit.nodes,
        home=visit.facts.home,
        code=visit.code,
        interpreters=dict(visit.interpreters),
        node_python=visit.python,
    )


def request_for(record: FleetRecord, host: HostRecord) -> dict[str, Any]:
    """Return the `cluster.nodes.joined_nodes.Request` of a host.

    It contains secrets: send it over ssh, not in a command.
    """
    with tempfile.TemporaryDirectory(prefix="pf-tls-") as folder:
        node_folder = Path(folder) / "node"
        tls.make_certificate(home() / "tls-authority", node_folder, (host.address,))
        certificates = {name: (node_folder / name).read_text() for name in tls.FILES}
    host_spec = embedded.spec_of(record).on_host(host.name)
    return {
        "name": record.name,
        "identity": identity.fleet_identity(home()),
        "head": record.address,
        "host": host.name,
        "address": host.address,
        "token": tokens.read(Path(record.token_path)),
        "certificates": certificates,
        "fleet": {name: pool.model_dump(mode="json") for name, pool in host_spec.pools.items()},
        "interpreters": host.interpreters,
        "cluster": record.cluster,
    }


def leave(hosts: Iterable[HostRecord], progress: Progress) -> list[str]:
    """Stop the fleet's processes on these hosts; returns the stopped nodes.

    A host that cannot be reached is recorded, and `leave_pending` stops its processes later.
    """

    def left(host: HostRecord) -> list[str]:
        remote = Remote(host.host, SSHSpec(**host.ssh))
        try:
            stopped = host_steps.leave(remote, host.python, host.code, host.home)
        except PolyfleetError as e:
            progress(
                f"nodes on host {host.host} are not stopped: {e.message}; run `polyfleet down` again once the host "
                "can be reached"
            )
            pending_stops.add(host)
            return []
        pending_stops.remove(host)
        return stopped

    return [node for nodes in map_in_threads(list(hosts), left) for node in nodes]


def leave_pending(progress: Progress, but: Iterable[str] = ()) -> list[str]:
    """Stop the fleet's processes on hosts that could not be reached at `down`, if they can be reached now.

    Returns the stopped nodes.
    """
    return leave((host for host in pending_stops.hosts() if host.name not in set(but)), progress)
