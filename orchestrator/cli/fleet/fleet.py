"""Commands for the fleet: up, down, status, inventory, backends, doctor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.terminal.output import Format, Output, emit, print_message, progress_line

Data = dict[str, Any]
Local = Annotated[bool, typer.Option("--local", help="Show this machine only (default if no fleet is running)")]
ACTIONABLE_LEVELS = ("error", "warning")


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

    Creates the pools' environments (which takes minutes the first time), starts a Ray node per pool and host, and the
    server. Without a file: a pool for each back end of this machine. If the fleet is already running, only missing
    nodes are started. With --address no node is started here: --file then declares which pools the cluster's autoscaler
    may grow (min_nodes, max_nodes), and their prices.
    """
    if demo and (file or address):
        raise typer.BadParameter("--demo cannot be combined with --file or --address")
    from orchestrator.client import lifecycle
    from orchestrator.show.fleet import fleet, hosts

    if dry_run:
        if not file or address:
            raise typer.BadParameter("--dry-run checks the hosts of a fleet file: name the file with --file")
        host_plans = lifecycle.plan(file)
        emit(host_plans, output, hosts)
        if any(row["problem"] for row in host_plans):
            raise typer.Exit(2)
        return
    emit(lifecycle.up(print_message, file, demo=demo, address=address), output, fleet)


def down() -> None:
    """Stop the server and the fleet. Running jobs are interrupted; checkpoints remain.

    Exit code 3 if a host could not be reached: its nodes may still run. The next `up` or `down` that reaches the host
    stops them.
    """
    from cluster.errors import FleetError
    from cluster.hosts import pending_stops
    from orchestrator.client import lifecycle

    with progress_line("stopping server and fleet"):
        stopped = lifecycle.down(print_message)
    print_message(f"stopped: {', '.join(stopped)}" if stopped else "nothing was stopped")
    if pending_stops.hosts():
        raise typer.Exit(FleetError.exit_code)


def status(output: Output = Format.TABLE) -> None:
    """Show a summary of server, fleet and jobs. Starts nothing."""
    from orchestrator.cli.fleet.server import state
    from orchestrator.show.fleet import status as show_status

    view: Data = {"server": state(), "fleet": None, "fleet_note": "", "jobs": {}, "health": None}
    if view["server"]["running"]:
        view |= _from_server()
    else:
        view["fleet_note"] = _recorded_fleet()
    emit(view, output, show_status)


def _from_server() -> Data:
    from cluster.errors import FleetError
    from orchestrator.client.client import connect

    with connect(start=False) as client:
        health = dict(client.server.health())
        view: Data = {"jobs": health.pop("jobs"), "health": health}
        try:
            return view | {"fleet": client.fleet.show()}
        except FleetError as e:
            return view | {"fleet_note": str(e)}


def _recorded_fleet() -> str:
    from cluster.nodes import embedded

    record = embedded.record()
    if record is None:
        return "no fleet is up; start one with `polyfleet up`"
    running_count = len(record.running())
    nodes = f", {running_count} of {len(record.processes)} nodes run" if record.is_embedded else ""
    return f"fleet {record.name} at {record.address} is recorded as {record.state}{nodes}"


def inventory(local: Local = False, output: Output = Format.TABLE) -> None:
    """List nodes and devices: kind, memory, state, and the job each is allocated to."""
    from orchestrator.show.fleet import devices

    if local or not _has_fleet():
        from orchestrator.client import local_machine

        emit([local_machine.local_node()], output, devices)
    else:
        from orchestrator.client.client import connect

        with connect(progress=print_message) as client:
            emit(client.nodes.list(), output, devices)


def backends(
    local: Local = False,
    libraries: Annotated[bool, typer.Option("--libraries", help="Also list the execution libraries of torch")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Also list kernel implementations")] = False,
    output: Output = Format.TABLE,
) -> None:
    """List back ends with devices and memory, or the reason one is unavailable, and mark the recommended one."""
    from orchestrator.client import local_machine
    from orchestrator.show import fleet as show
    from orchestrator.show import kernels as show_kernels

    if kernels:
        with progress_line("querying drivers"):
            rows = local_machine.kernels()
        emit(rows, output, show_kernels.listed)
        return
    if libraries or local or not _has_fleet():
        with progress_line("querying torch"):
            summary = local_machine.libraries() if libraries else local_machine.backends()
        emit(summary, output, show.libraries if libraries else show.backends)
        return
    from orchestrator.client.client import connect
    from orchestrator.client.inventory import backend_rows

    with connect(progress=print_message) as client:
        emit(backend_rows(client.nodes.list()), output, show.backends)


def doctor(local: Local = False, output: Output = Format.TABLE) -> None:
    """Check the fleet: print each problem and the next step. Exit code 1 if there is an error or a warning."""
    from orchestrator.cli.terminal.errors import FAILED
    from orchestrator.show.fleet import findings

    if local or not _has_fleet():
        from orchestrator.client import local_machine

        with progress_line("checking this machine"):
            problems: Sequence[Mapping[str, Any]] = local_machine.findings()
    else:
        from orchestrator.client.client import connect

        with connect(progress=print_message) as client:
            problems = client.fleet.doctor()
    emit(problems, output, findings)
    if any(finding["level"] in ACTIONABLE_LEVELS for finding in problems):
        raise typer.Exit(FAILED)


def _has_fleet() -> bool:
    """Return whether a fleet is recorded, or a server runs that may have one."""
    from cluster import paths
    from cluster.nodes import embedded
    from orchestrator.home import daemon

    return embedded.record() is not None or daemon.find_server(paths.home()) is not None
