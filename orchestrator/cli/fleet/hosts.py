"""`polyfleet hosts …`: machines of the running fleet."""

from typing import Annotated

import typer

from orchestrator.cli.terminal import completion_values
from orchestrator.cli.terminal.output import Format, Output, emit, print_message

app = typer.Typer(help="Machines of the running fleet.", no_args_is_help=True, rich_markup_mode=None)
Host = Annotated[str, typer.Argument(help="Host name or alias that `ssh` accepts", metavar="HOST")]
FILE_UNCHANGED = "the fleet file was not changed: change it too, or the next `polyfleet up --file` undoes this"


@app.command("list")
def list_hosts(output: Output = Format.TABLE) -> None:
    """List the hosts with their addresses, nodes and state."""
    from orchestrator.client import hosts
    from orchestrator.show.fleet import host_states

    emit(hosts.rows(), output, host_states)


@app.command()
def add(
    pool: Annotated[
        str,
        typer.Argument(
            help="Pool of the fleet file that has hosts", metavar="POOL", autocompletion=completion_values.pool
        ),
    ],
    host: Host,
    address: Annotated[str, typer.Option(help="IP address for the other nodes (default: resolved from HOST)")] = "",
    devices: Annotated[int, typer.Option(help="Number of devices per CPU (0: as the pool declares)", min=0)] = 0,
) -> None:
    """Add a machine to a pool of the running fleet."""
    from orchestrator.client import hosts

    hosts.add(pool, host, address, devices, print_message)
    print_message(FILE_UNCHANGED)


@app.command()
def remove(host: Host) -> None:
    """Move the jobs of a machine elsewhere, then stop its nodes."""
    from orchestrator.client import hosts

    hosts.remove(host, print_message)
    print_message(FILE_UNCHANGED)
