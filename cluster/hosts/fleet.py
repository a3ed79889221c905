"""The hosts of a fleet that is up: joined, joined again, left. One thread a host, one SSH connection a step."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cluster import embedded, identity, tls, tokens
from cluster.errors import PolyfleetError
from cluster.fleet_record import FleetRecord, HostRecord
from cluster.hosts import host_steps, pending_stops
from cluster.hosts.spec import SSHSpec
from cluster.hosts.ssh import Remote
from cluster.hosts.survey import Visit, each
from cluster.paths import home

Progress = Callable[[str], None]


def join(visits: list[Visit], progress: Progress) -> list[Visit]:
    """Start the nodes of every host. Each is on record before anything is started there. Errors stand in the visits."""
    joining = {visit.name: host_record(visit) for visit in visits}
    record = embedded.keep_hosts(joining)

    def joined(visit: Visit) -> Visit:
        try:
            join_one(record, joining[visit.name], progress)
        except PolyfleetError as e:
            return visit.failed(e)
        progress(f"host {visit.wanted.host}: {', '.join(visit.nodes)} joined")
        return visit

    return each(visits, joined)


def join_one(record: FleetRecord, host: HostRecord, progress: Progress) -> None:
    """Start the nodes that do not run there. Nothing happens on a host that has all of them. Raises PolyfleetError."""
    remote = Remote(host.host, SSHSpec(**host.ssh))
    host_steps.join(remote, host.python, host.code, host.home, request_for(record, host), progress)


def host_record(visit: Visit) -> HostRecord:
    assert visit.found is not None
    return HostRecord(
        name=visit.name,
        host=visit.wanted.host,
        address=visit.wanted.address,
        ssh=visit.remote.ssh.model_dump(mode="json"),
        nodes=visit.nodes,
        home=visit.found.home,
        code=visit.code,
        interpreters=dict(visit.interpreters),
        node_python=visit.python,
    )


def request_for(record: FleetRecord, host: HostRecord) -> dict[str, Any]:
    """As `cluster.joined_nodes.Request`. Secrets go over ssh's own channel, never on a command line."""
    with tempfile.TemporaryDirectory(prefix="pf-tls-") as folder:
        made = Path(folder) / "node"
        tls.make_certificate(home() / "tls-authority", made, (host.address,))
        certificates = {name: (made / name).read_text() for name in tls.FILES}
    there = embedded.spec_of(record).on_host(host.name)
    return {
        "name": record.name,
        "identity": identity.fleet_identity(home()),
        "head": record.address,
        "host": host.name,
        "address": host.address,
        "token": tokens.read(Path(record.token_path)),
        "certificates": certificates,
        "fleet": {name: pool.model_dump(mode="json") for name, pool in there.pools.items()},
        "interpreters": host.interpreters,
        "cluster": record.cluster,
    }


def leave(hosts: Iterable[HostRecord], progress: Progress) -> list[str]:
    """Stop what is ours on these hosts; returns the nodes. A host that is away is written down, and left when it is
    reached next (`settle`).
    """

    def left(host: HostRecord) -> list[str]:
        remote = Remote(host.host, SSHSpec(**host.ssh))
        try:
            stopped = host_steps.leave(remote, host.python, host.code, host.home)
        except PolyfleetError as e:
            progress(f"host {host.host} is not left: {e.message}; run `polyfleet down` again once it is reached")
            pending_stops.remember(host)
            return []
        pending_stops.forget(host)
        return stopped

    return [node for nodes in each(list(hosts), left) for node in nodes]


def settle(progress: Progress, but: Iterable[str] = ()) -> None:
    """Leave the hosts that were away when they should have been left, as far as they are reached now."""
    if waiting := [host for host in pending_stops.hosts() if host.name not in set(but)]:
        leave(waiting, progress)
