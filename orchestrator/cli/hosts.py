"""`polyfleet hosts …`: the machines of a fleet that is up."""

from typing import Annotated

import typer

from orchestrator.cli import completion_values
from orchestrator.cli.output import Format, Output, emit, print_message

app = typer.Typer(help="The machines of a fleet that is up.", no_args_is_help=True, rich_markup_mode=None)
Host = Annotated[str, typer.Argument(help="Name by which `ssh` reaches it.", metavar="HOST")]
KEEP = "the fleet file is as it was: change it too, or the next `polyfleet up -f` undoes this"


@app.command("list")
def list_hosts(output: Output = Format.TABLE) -> None:
    """Every host: its address, nodes and their state."""
    from orchestrator import hosts
    from orchestrator.show.fleet import host_states

    emit(hosts.rows(), output, host_states)


@app.command()
def add(
    pool: Annotated[
        str,
        typer.Argument(
            help="A pool with hosts, as in the fleet file.", metavar="POOL", autocompletion=completion_values.pool
        ),
    ],
    host: Host,
    address: Annotated[str, typer.Option(help="IP address that the other nodes reach; default: by its name.")] = "",
    devices: Annotated[int, typer.Option(help="Into how many devices a CPU is split; 0: as the pool says.", min=0)] = 0,
) -> None:
    """Join a machine to a pool of the fleet that is up."""
    from orchestrator import hosts

    hosts.add(pool, host, address, devices, print_message)
    print_message(KEEP)


@app.command()
def remove(host: Host) -> None:
    """Move jobs away from a machine, then stop what is ours there."""
    from orchestrator import hosts

    hosts.remove(host, print_message)
    print_message(KEEP)
