"""`polyfleet env …`: the Python environments of pools."""

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.terminal import completion_values
from orchestrator.cli.terminal.output import Format, Output, emit, print_message, write

app = typer.Typer(help="Python environments of pools.", no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[
    str,
    typer.Argument(
        help="Built-in environment, or a pool of the fleet file",
        metavar="POOL",
        autocompletion=completion_values.pool,
    ),
]
FleetFile = Annotated[Path | None, typer.Option("--file", "-f", help="Fleet file that declares the pools")]


@app.command("list")
def list_(output: Output = Format.TABLE) -> None:
    """List the Python environments on this machine."""
    from cluster.environments.environments import list_environments
    from orchestrator.show.fleet import environments

    emit([_plain(e) for e in list_environments()], output, environments)


@app.command()
def create(name: Name, file: FleetFile = None) -> None:
    """Create an environment if it is missing, and print its interpreter. The first time takes minutes."""
    from cluster.environments import environments

    write(str(environments.create(_find_environment(name, file), print_message)))


@app.command()
def path(name: Name, file: FleetFile = None) -> None:
    """Print the interpreter of an environment that exists."""
    from cluster.environments import environments

    write(str(environments.path(_find_environment(name, file))))


@app.command()
def remove(name: Annotated[str, typer.Argument(help="Environment name, as `polyfleet env list` prints it")]) -> None:
    """Remove an environment, unless a process runs from it."""
    from cluster.environments import environments

    for folder in environments.remove(name):
        print_message(f"removed {folder}")


def _find_environment(name: str, file: Path | None) -> Any:
    """The environment for `name`: a pool of `file`, a built-in environment, or a pool of the demo fleet."""
    from cluster.environments.recipes import NAMES
    from cluster.errors import NotFound, nearest
    from cluster.fleet.fleet_spec import FLEETS, load_fleet

    if file is None and name in NAMES:
        return name
    fleet = load_fleet(file or FLEETS / "demo.yaml")
    if name not in fleet.pools:
        raise NotFound(f"no pool or environment {name!r}", nearest(name, [*fleet.pools, *NAMES]))
    return fleet.pools[name].environment


def _plain(environment: Any) -> dict[str, Any]:
    from cluster.serialization import to_plain

    plain: dict[str, Any] = to_plain(environment)
    return plain | {"path": str(environment.path)}
