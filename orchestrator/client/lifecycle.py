"""Start a fleet and its server on this machine, and stop them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import paths
from cluster.fleet.fleet_record import DamagedRecord
from cluster.fleet.fleet_spec import (
    FleetSpec,
    check_attachable,
    check_startable,
    default_fleet,
    demo_fleet,
    drop_unavailable_pools,
    load_fleet,
)
from cluster.hosts import fleet as hosts
from cluster.hosts import head, pending_stops, survey
from cluster.nodes import embedded
from orchestrator.client.client import connect
from orchestrator.client.server_connection import check_version
from orchestrator.home import daemon
from orchestrator.spec import node_groups

if TYPE_CHECKING:
    from orchestrator.client.client import Client
    from orchestrator.views.fleet import FleetView

Progress = Callable[[str], None]
NODES_READY_S = 90.0
LEAVE_TIMEOUT_S = 20.0


def up(progress: Progress, file: Path | None = None, *, demo: bool = False, address: str = "") -> "FleetView":
    """Start the fleet of `file`, the demo fleet, or the Ray cluster at `address` (`file` may describe its pools); by
    default, a pool for each back end of this machine.

    Returns the server's view of the fleet once every node has an agent, or after 90 s with the nodes that have one.
    """
    if (server := daemon.find_server(paths.home())) is not None:
        check_version(server)
    before = embedded.record()
    try:
        return _up(progress, file, demo, address)
    except BaseException:
        if before is None and embedded.record() is not None:  # undo what this call started
            down(progress)
        raise


def _up(progress: Progress, file: Path | None, demo: bool, address: str) -> "FleetView":
    if address:
        spec = check_attachable(load_fleet(file)) if file else None
        node_groups.groups_of_fleet(spec)  # raises for invalid groups before anything starts
        record = embedded.join_cluster(address, progress, spec)
    else:
        from workers.devices.discovery import accelerators

        counts = accelerators()
        fleet, left_out = _choose_fleet(file, demo, list(counts))
        for pool, reason in left_out:
            progress(f"pool {pool} is left out: {reason}")
        record = _start_on_hosts(fleet, left_out, counts, progress)
    with connect(progress=progress) as client:
        _await_nodes(client, _expected_nodes(record), progress, grows=bool(node_groups.groups_of_pools(record.pools)))
        return client.fleet.show()


def _start_on_hosts(
    fleet: FleetSpec, left_out: Sequence[tuple[str, str]], accelerator_counts: Mapping[str, int], progress: Progress
) -> Any:
    """Start the fleet on this machine, then on its hosts. All hosts are checked and prepared before anything starts."""
    host_names = {p.host.name for p in fleet.placements} | {fleet.head.host_name} - {""}
    hosts.leave_pending(progress, but=host_names)
    visits = survey.usable_hosts(fleet, survey.survey(fleet), progress) if fleet.placements else []
    visits = survey.usable_hosts(fleet, survey.install_pythons(visits, progress), progress)
    visits = survey.usable_hosts(fleet, survey.prepare(fleet, visits, progress), progress)
    survey.check_storages(fleet, visits, progress)
    lead = next((visit for visit in visits if visit.request.leads), None)
    record = head.up(fleet, lead, progress) if lead else embedded.up(fleet, progress, left_out, accelerator_counts)
    if removed := [host for host in record.hosts if host.name not in host_names]:
        hosts.leave(removed, progress)
        embedded.remove_hosts({host.name for host in removed})
    if joining := [visit for visit in visits if visit.nodes]:
        survey.usable_hosts(fleet, hosts.join(joining, progress), progress)
    return embedded.record() or record


def change(fleet: FleetSpec, progress: Progress) -> None:
    """Change the running fleet to have the hosts of `fleet`."""
    record = embedded.record()
    counts = record.accelerator_counts if record is not None else {}
    expected = _expected_nodes(
        _start_on_hosts(fleet, record.skipped_pools if record is not None else (), counts, progress)
    )
    with connect(progress=progress) as client:
        _await_nodes(client, expected, progress)


def _expected_nodes(record: Any) -> set[str]:
    """Names of the nodes that are expected to join."""
    return {p.node for p in record.processes if p.role == "worker"} | {n for host in record.hosts for n in host.nodes}


def plan(file: Path) -> list[dict[str, Any]]:
    """List what `up` would do on each host of a fleet file, without changing anything. Empty without hosts."""
    fleet, _ = _choose_fleet(file, False, [])
    return [visit.view() for visit in survey.survey(fleet)] if fleet.placements else []


def down(progress: Progress) -> list[str]:
    """Stop the server, then the nodes of the embedded fleet. Returns what was stopped.

    In a Ray cluster that Polyfleet did not start, the server first removes its agents.
    """
    with suppress(DamagedRecord):
        _leave_cluster(progress)
    server = daemon.stop_server(paths.home())
    return [*(["server"] if server else []), *_leave_hosts(progress), *embedded.down(progress)]


def _leave_hosts(progress: Progress) -> list[str]:
    """Stop the hosts of the fleet, and those of earlier fleets that were away when these were stopped."""
    with suppress(DamagedRecord):
        if (record := embedded.record()) is not None and record.hosts:
            hosts_by_name = {host.name: host for host in (*record.hosts, *pending_stops.hosts())}
            # The host of the head is last, because nodes of the others sign off at the head.
            last = [hosts_by_name.pop(record.head_host)] if record.head_host in hosts_by_name else []
            return hosts.leave(hosts_by_name.values(), progress) + hosts.leave(last, progress)
    return hosts.leave_pending(progress)


def _leave_cluster(progress: Progress) -> None:
    record = embedded.record()
    if record is None or record.is_ours or daemon.find_server(paths.home()) is None:
        return
    embedded.set_fleet_state("leaving")
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    while (now := embedded.record()) and now.state == "leaving":
        if time.monotonic() > deadline:
            progress(f"{record.address} did not respond; Polyfleet agents may still run there")
            return
        time.sleep(0.05)


def _choose_fleet(
    file: Path | None, demo: bool, accelerator_names: list[str]
) -> tuple[FleetSpec, list[tuple[str, str]]]:
    """The fleet to start, and the pools left out of it with the reason."""
    if file is not None:
        return drop_unavailable_pools(check_startable(load_fleet(file)))
    return demo_fleet(accelerator_names) if demo else (default_fleet(accelerator_names), [])


def _await_nodes(client: "Client", expected: set[str], progress: Progress, grows: bool = False) -> None:
    """Wait until the server has an agent on every expected node. In a cluster that Polyfleet did not start, that is
    every node that it has; it may have none if nodes are started on demand (`grows`).

    At the time-out, the missing nodes are reported; they may still come. Nodes of such a cluster that cannot be used
    are not waited for: `doctor` shows the reason.
    """
    deadline = time.monotonic() + NODES_READY_S
    any_node = set() if grows else {"any node"}
    missing = expected or {"any node"}
    while missing:
        # Until the server has joined this fleet's cluster, it may still list the nodes of the previous one.
        joined = client.fleet.show()["state"] == "up"
        states = {n["node"]: n["state"] for n in client.nodes.list()} if joined else {}
        present = {node for node, state in states.items() if state not in ("lost", "resting")}
        awaited = expected or present or (any_node if joined else {"any node"})
        now_missing = awaited - {node for node, state in states.items() if state == "ready"}
        if now_missing and now_missing != missing:
            progress(f"waiting for the agents of {', '.join(sorted(now_missing))}")
        missing = now_missing
        if missing and time.monotonic() > deadline:
            progress(f"not ready yet: {', '.join(sorted(missing))}; `polyfleet doctor` shows why")
            return
        time.sleep(0.1 if missing else 0)
