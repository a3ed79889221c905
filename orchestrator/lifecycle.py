"""Bring a fleet and its server up on this machine, and take them down again."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import embedded, paths
from cluster.fleet_record import DamagedRecord
from cluster.fleet_spec import (
    FleetSpec,
    attachable,
    default_fleet,
    demo_fleet,
    drop_unavailable_pools,
    load_fleet,
    startable,
)
from cluster.hosts import fleet as hosts
from cluster.hosts import head, pending_stops, survey
from orchestrator import node_groups
from orchestrator.client import connect
from orchestrator.server import daemon
from orchestrator.server_connection import check_version

if TYPE_CHECKING:
    from orchestrator.client import Client

Progress = Callable[[str], None]
NODES_READY_S = 90.0
LEAVE_S = 20.0


def up(progress: Progress, file: Path | None = None, *, demo: bool = False, address: str = "") -> dict[str, Any]:
    """The fleet of `file`, the demo's, the Ray cluster at `address` (whose pools `file` may describe), or else a pool
    for each back end of this machine.

    Returns the fleet as the server sees it, once every node has an agent, or after 90 s with those that have one.
    """
    if (server := daemon.find_server(paths.home())) is not None:
        check_version(server)
    before = embedded.record()
    try:
        return _up(progress, file, demo, address)
    except BaseException:
        if before is None and embedded.record() is not None:  # what this call began, it takes down again
            down(progress)
        raise


def _up(progress: Progress, file: Path | None, demo: bool, address: str) -> dict[str, Any]:
    if address:
        spec = attachable(load_fleet(file)) if file else None
        node_groups.of_fleet(spec)  # what cannot be asked for is told before anything starts
        record = embedded.join_cluster(address, progress, spec)
    else:
        from workers.discovery import accelerators

        found = accelerators()
        fleet, left_out = _wanted(file, demo, list(found))
        for pool, reason in left_out:
            progress(f"pool {pool} is left out: {reason}")
        record = _spread(fleet, left_out, found, progress)
    with connect(progress=progress) as client:
        _await_nodes(client, _expected(record), progress, grows=bool(node_groups.of_pools(record.pools)))
        return client.fleet()


def _spread(fleet: FleetSpec, left_out: Sequence[tuple[str, str]], found: Mapping[str, int], progress: Progress) -> Any:
    """The fleet up on this machine, then on its hosts, which were all looked at and prepared before anything starts."""
    wanted = {p.host.name for p in fleet.placements} | {fleet.head.host_name} - {""}
    hosts.settle(progress, but=wanted)
    visits = survey.accepted(fleet, survey.survey(fleet), progress) if fleet.placements else []
    visits = survey.accepted(fleet, survey.prepare(fleet, visits, progress), progress)
    survey.look_at_storages(fleet, visits, progress)
    lead = next((visit for visit in visits if visit.wanted.leads), None)
    record = head.up(fleet, lead, progress) if lead else embedded.up(fleet, progress, left_out, found)
    if gone := [host for host in record.hosts if host.name not in wanted]:
        hosts.leave(gone, progress)
        embedded.forget_hosts({host.name for host in gone})
    if joining := [visit for visit in visits if visit.nodes]:
        survey.accepted(fleet, hosts.join(joining, progress), progress)
    return embedded.record() or record


def change(fleet: FleetSpec, progress: Progress) -> None:
    """Give the fleet that is up the hosts of `fleet`."""
    record = embedded.record()
    found = record.found if record is not None else {}
    expected = _expected(_spread(fleet, record.left_out if record is not None else (), found, progress))
    with connect(progress=progress) as client:
        _await_nodes(client, expected, progress)


def _expected(record: Any) -> set[str]:
    """Names of the nodes that are to report."""
    return {p.node for p in record.processes if p.role == "worker"} | {n for host in record.hosts for n in host.nodes}


def plan(file: Path) -> list[dict[str, Any]]:
    """What `up` would do on each host of that fleet file; nothing is changed anywhere. Empty without hosts."""
    fleet, _ = _wanted(file, False, [])
    return [visit.view() for visit in survey.survey(fleet)] if fleet.placements else []


def down(progress: Progress) -> list[str]:
    """Stop the server, then the nodes of the embedded fleet. Returns what was stopped.

    Of a cluster that is not ours, the server first takes its agents away.
    """
    with suppress(DamagedRecord):
        _leave(progress)
    server = daemon.stop_server(paths.home())
    return [*(["server"] if server else []), *_leave_hosts(progress), *embedded.down(progress)]


def _leave_hosts(progress: Progress) -> list[str]:
    """Those of the fleet, and those that were away when an earlier one was taken down."""
    with suppress(DamagedRecord):
        if (record := embedded.record()) is not None and record.hosts:
            known = {host.name: host for host in (*record.hosts, *pending_stops.hosts())}
            last = [known.pop(record.head_host)] if record.head_host in known else []  # nodes take leave of their head
            return hosts.leave(known.values(), progress) + hosts.leave(last, progress)
    hosts.settle(progress)
    return []


def _leave(progress: Progress) -> None:
    record = embedded.record()
    if record is None or record.ours or daemon.find_server(paths.home()) is None:
        return
    embedded.set_fleet_state("leaving")
    deadline = time.monotonic() + LEAVE_S
    while (now := embedded.record()) and now.state == "leaving":
        if time.monotonic() > deadline:
            progress(f"{record.address} did not answer; Polyfleet agents may still run there")
            return
        time.sleep(0.05)


def _wanted(file: Path | None, demo: bool, found: list[str]) -> tuple[FleetSpec, list[tuple[str, str]]]:
    """The fleet to bring up, and the pools left out of it with the reason."""
    if file is not None:
        return drop_unavailable_pools(startable(load_fleet(file)))
    return demo_fleet(found) if demo else (default_fleet(found), [])


def _await_nodes(client: "Client", expected: set[str], progress: Progress, grows: bool = False) -> None:
    """Until the server has an agent on every expected node; of a cluster that is not ours, on every node it has, which
    may be none where nodes are started for jobs (`grows`).

    Late ones are named; they may still come. Those of others that cannot be used are not waited for: `doctor` says why.
    """
    deadline = time.monotonic() + NODES_READY_S
    any_node = set() if grows else {"any node"}
    missing = expected or {"any node"}
    while missing:
        # Until it has joined this fleet's cluster, the server may still tell of the nodes of the one before.
        joined = client.fleet()["state"] == "up"
        states = {n["node"]: n["state"] for n in client.nodes()} if joined else {}
        here = {node for node, state in states.items() if not state.startswith(("lost", "resting"))}
        wanted = expected or here or (any_node if joined else {"any node"})
        now_missing = wanted - {node for node, state in states.items() if state == "ready"}
        if now_missing and now_missing != missing:
            progress(f"waiting for the agents of {', '.join(sorted(now_missing))}")
        missing = now_missing
        if missing and time.monotonic() > deadline:
            progress(f"not ready yet: {', '.join(sorted(missing))}; `polyfleet doctor` tells more")
            return
        time.sleep(0.1 if missing else 0)
