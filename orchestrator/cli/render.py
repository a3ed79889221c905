"""`polyfleet render kuberay|ray-autoscaler|slurm`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.terminal.output import print_message, write


class Engine(StrEnum):
    KUBERAY = "kuberay"
    RAY_AUTOSCALER = "ray-autoscaler"
    SLURM = "slurm"


def render(
    engine: Annotated[Engine, typer.Argument(help="Target: a RayCluster, a file for `ray up`, or a Slurm script")],
    file: Annotated[Path, typer.Option("--file", "-f", help="Fleet file; `polyfleet schema fleet` prints its schema")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write (default: standard output)")
    ] = None,
) -> None:
    """Write the file that starts the pools of a fleet file on Kubernetes, in a cloud or in a Slurm job.

    Starts nothing and contacts no cluster. Notes on how to use the file are printed on standard error.
    """
    from importlib import import_module

    from cluster.errors import UserError
    from cluster.fleet.fleet_spec import load_fleet

    renderer = import_module(f"cluster.render.{engine.value.replace('-', '_')}")
    text, remarks = renderer.render(load_fleet(file))
    for remark in remarks:
        print_message(f"note: {remark}")
    if output is None:
        write(text.rstrip("\n"))
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"cannot write {output}: {e.strerror}", "name a file in a folder that exists") from None
