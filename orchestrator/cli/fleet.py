"""Verbs about what there is: up, down, status, inventory, backends, doctor."""

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.output import Format, Output, emit, print_message, progress_line

Data = dict[str, Any]
Local = Annotated[bool, typer.Option("--local", help="Show this machine only (default when no fleet is up)")]
ACT_ON = ("error", "warning")


def up(
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Fleet file; `polyfleet schema fleet` prints its schema")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Start the demo's pools that this machine supports")] = False,
    address: Annotated[str, typer.Option(help="Existing Ray cluster to use, HOST:PORT (default: start one)")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the hosts of --file and print the plan, without changes")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Start a fleet on this machine and on the hosts of its fleet file, or connect to a running Ray cluster.

    Makes the pools' environments (minutes the first time), starts a Ray node per pool and host, and the server. Without
    a file: a pool for each back end this machine has. Returns at once when that fleet is up; nodes that are missing are
    started. With --address no node is started here: --file then says which pools the cluster's autoscaler may grow
    (min_nodes, max_nodes), and what they cost.
    """
    if demo and (file or address):
        raise typer.BadParameter("--demo takes neither --file nor --address")
    from orchestrator import lifecycle
    from orchestrator.show.fleet import fleet, hosts

    if dry_run:
        if not file or address:
            raise typer.BadParameter("--dry-run looks at the hosts of a fleet file: give it by --file")
        found = lifecycle.plan(file)
        emit(found, output, hosts)
        if any(row["problem"] for row in found):
            raise typer.Exit(2)
        return
    emit(lifecycle.up(print_message, file, demo=demo, address=address), output, fleet)


def down() -> None:
    """Stop the server and the fleet. Running jobs are interrupted; checkpoints are kept."""
    from orchestrator import lifecycle

    with progress_line("stopping server and fleet"):
        stopped = lifecycle.down(print_message)
    print_message(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")


def status(output: Output = Format.TABLE) -> None:
    """Show a summary of server, fleet and jobs. Starts nothing."""
    from orchestrator.cli.server import state
    from orchestrator.show.fleet import status as shown

    answer: Data = {"server": state(), "fleet": None, "fleet_note": "", "jobs": {}, "health": None}
    if answer["server"]["running"]:
        answer |= _from_server()
    else:
        answer["fleet_note"] = _recorded_fleet()
    emit(answer, output, shown)


def _from_server() -> Data:
    from cluster.errors import FleetError
    from orchestrator.client import connect

    with connect(start=False) as client:
        health = client.health()
        told: Data = {"jobs": health.pop("jobs"), "health": health}
        try:
            return told | {"fleet": client.fleet()}
        except FleetError as e:
            return told | {"fleet_note": str(e)}


def _recorded_fleet() -> str:
    from cluster import embedded

    record = embedded.record()
    if record is None:
        return "no fleet is up; `polyfleet up` brings one up"
    living = len(record.living())
    nodes = f", {living} of {len(record.processes)} nodes live" if record.embedded else ""
    return f"fleet {record.name} at {record.address} is recorded as {record.state}{nodes}"


def inventory(local: Local = False, output: Output = Format.TABLE) -> None:
    """List nodes and devices: kind, memory, state, and the job each is allocated to."""
    from orchestrator.show.fleet import devices

    if local or not _fleet_here():
        from orchestrator import local_machine

        emit([local_machine.local_node()], output, devices)
    else:
        from orchestrator.client import connect

        with connect(progress=print_message) as client:
            emit(client.nodes(), output, devices)


def backends(
    local: Local = False,
    libraries: Annotated[bool, typer.Option("--libraries", help="Also list the execution libraries of torch")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Also list kernel implementations")] = False,
    output: Output = Format.TABLE,
) -> None:
    """List back ends with devices and memory, or the reason one is unavailable, and mark the recommended one."""
    from orchestrator import local_machine
    from orchestrator.show import fleet as show
    from orchestrator.show import kernels as show_kernels

    if kernels:
        with progress_line("asking drivers"):
            rows = local_machine.kernels()
        emit(rows, output, show_kernels.listed)
        return
    if libraries or local or not _fleet_here():
        with progress_line("asking torch"):
            found = local_machine.libraries() if libraries else local_machine.backends()
        emit(found, output, show.libraries if libraries else show.backends)
        return
    from orchestrator.client import connect
    from orchestrator.inventory import backend_rows

    with connect(progress=print_message) as client:
        emit(backend_rows(client.nodes()), output, show.backends)


def doctor(local: Local = False, output: Output = Format.TABLE) -> None:
    """Check the fleet: print each problem and the next step. Exit code 1 if there is an error or a warning."""
    from orchestrator.cli.errors import FAILED
    from orchestrator.show.fleet import findings

    if local or not _fleet_here():
        from orchestrator import local_machine

        with progress_line("looking at this machine"):
            found = local_machine.findings()
    else:
        from orchestrator.client import connect

        with connect(progress=print_message) as client:
            found = client.doctor()
    emit(found, output, findings)
    if any(finding["level"] in ACT_ON for finding in found):
        raise typer.Exit(FAILED)


def _fleet_here() -> bool:
    """A fleet is recorded, or a server runs that may know of one."""
    from cluster import embedded, paths
    from orchestrator.server import daemon

    return embedded.record() is not None or daemon.find_server(paths.home()) is not None
