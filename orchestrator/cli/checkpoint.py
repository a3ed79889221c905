"""`polyfleet checkpoint …`: what lies in the pools' storage, and moving it between pools."""

from typing import Annotated

import typer

from orchestrator.cli.output import Format, Output, emit, say, waiting

app = typer.Typer(
    help="Checkpoints of pools: list, show, verify, copy, plan.", no_args_is_help=True, rich_markup_mode=None
)
Ref = Annotated[str, typer.Argument(help="POOL:PATH, the path within the pool's storage.", metavar="POOL:PATH")]
Kind = Annotated[
    str, typer.Option("--to", help="Kind to check against, e.g. tpu:v5e; by default that of the target pool.")
]


@app.command("list")
def list_(
    prefix: Annotated[str, typer.Argument(help="Only below this path.")] = "",
    pool: Annotated[str, typer.Option(help="Only of this pool.")] = "",
    output: Output = Format.TABLE,
) -> None:
    """Checkpoints of one pool, or of all."""
    from orchestrator.client import connect
    from orchestrator.show.checkpoints import checkpoints

    with connect(progress=say) as client:
        emit(client.checkpoints(pool, prefix), output, checkpoints)


@app.command()
def show(ref: Ref, output: Output = Format.TABLE) -> None:
    """What a checkpoint holds: producer, step, tensors, bytes."""
    from orchestrator.client import connect
    from orchestrator.show.checkpoints import report

    with connect(progress=say) as client:
        emit(client.checkpoint_show(ref), output, report)


@app.command()
def verify(ref: Ref, output: Output = Format.TABLE) -> None:
    """Read every byte and compare with the manifest's hashes."""
    from orchestrator.client import connect
    from orchestrator.show.checkpoints import report

    with connect(progress=say) as client, waiting(f"verifying {ref}"):
        answer = client.checkpoint_verify(ref)
    emit(answer, output, report)


@app.command()
def plan(
    ref: Ref,
    to: Annotated[str, typer.Option("--to", help="Kind to move to, e.g. tpu:v5e.")],
    output: Output = Format.TABLE,
) -> None:
    """What a device of another kind would keep, convert or refuse."""
    from orchestrator.client import connect
    from orchestrator.show.checkpoints import report

    with connect(progress=say) as client:
        emit(client.checkpoint_plan(ref, to), output, report)


@app.command()
def copy(
    source: Ref,
    target: Annotated[str, typer.Argument(help="POOL:FOLDER to copy into.", metavar="POOL:FOLDER")],
    to: Kind = "",
    output: Output = Format.TABLE,
) -> None:
    """Copy a checkpoint to another pool and verify it there; it appears whole or not at all."""
    from orchestrator.client import connect
    from orchestrator.show.checkpoints import report
    from orchestrator.show.units import size

    with connect(progress=say) as client, waiting(f"copying {source}") as update:
        answer = client.checkpoint_copy(
            source, target, to, lambda done, total: update(f"copying {source}: {size(done)} of {size(total)}")
        )
    emit(answer, output, report)
