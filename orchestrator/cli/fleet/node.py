"""`polyfleet node …`: take a node out of use, and put it back into use."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from orchestrator.cli.terminal import completion_values
from orchestrator.cli.terminal.output import Format, Output, emit, print_message

app = typer.Typer(help="Take nodes out of use, and back.", no_args_is_help=True, rich_markup_mode=None)
Node = Annotated[
    str,
    typer.Argument(
        help="Node name, as `polyfleet inventory` prints it", metavar="NODE", autocompletion=completion_values.nodes
    ),
]
Data = Mapping[str, Any]


@app.command()
def drain(
    node: Node,
    now: Annotated[
        bool, typer.Option("--now", help="Also move running attempts: each saves a checkpoint and stops")
    ] = False,
    reason: Annotated[str, typer.Option(help="Reason that listings print with the node until it is resumed")] = "",
    output: Output = Format.TABLE,
) -> None:
    """Stop placing jobs on a node, for example before maintenance."""
    from orchestrator.client.client import connect

    with connect(progress=print_message) as client:
        _emit_state(client.nodes.drain(node, now=now, reason=reason), output)


@app.command()
def resume(node: Node, output: Output = Format.TABLE) -> None:
    """Place jobs again on a node that was drained or that failed too often."""
    from orchestrator.client.client import connect

    with connect(progress=print_message) as client:
        _emit_state(client.nodes.resume(node), output)


@app.command()
def remove(node: Node, output: Output = Format.TABLE) -> None:
    """Remove a lost node from the fleet."""
    from orchestrator.client.client import connect

    with connect(progress=print_message) as client:
        _emit_state(client.nodes.remove(node), output)


def _emit_state(view: Data, output: Format) -> None:
    from orchestrator.show.fleet import node_state

    emit(view, output, node_state)
