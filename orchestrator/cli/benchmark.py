"""`polyfleet benchmark`: one model, every pool, one table."""

from enum import StrEnum
from typing import Annotated

import typer

from orchestrator.cli.output import Format, Output, emit, say, waiting


class Level(StrEnum):
    O0 = "O0"
    O1 = "O1"
    O2 = "O2"
    O3 = "O3"


def benchmark(
    entry: Annotated[
        str, typer.Argument(help="What makes the model: file.py:function or module:function.", metavar="ENTRY")
    ],
    working_dir: Annotated[str, typer.Option(help="Folder to send along.")] = ".",
    pools: Annotated[str, typer.Option(help="Pools to measure, a,b; by default all, the first is the reference.")] = "",
    rounds: Annotated[int, typer.Option(help="Measured rounds; 0: the task's default.", min=0)] = 0,
    batch_size: Annotated[int, typer.Option(help="Items per call; 0: the task's default.", min=0)] = 0,
    sample_input: Annotated[str, typer.Option(help="What makes the input: module:function.")] = "",
    train: Annotated[bool, typer.Option("--train/--no-train", help="Measure the training step too.")] = True,
    level: Annotated[Level | None, typer.Option(help="Optimisation level.", show_choices=True)] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "",
    output: Output = Format.TABLE,
) -> None:
    """Measure a model in each pool and compare.

    One job per pool, one after the other. Exit code 1 when a pool has no result.
    """
    from orchestrator.api import Orchestrator
    from orchestrator.cli.errors import FAILED
    from orchestrator.show.benchmark import comparison

    chosen = [name.strip() for name in pools.split(",") if name.strip()] or None
    try:
        with Orchestrator.connect(progress=say) as o, waiting("benchmark") as update:
            answer = o.benchmark(
                entry,
                working_dir=working_dir,
                pools=chosen,
                rounds=rounds,
                batch_size=batch_size,
                sample_input=sample_input,
                train=train,
                level=level.value if level else "",
                precision=precision,
                progress=update,
            )
    except KeyboardInterrupt:
        say("interrupted; the job that was being measured is cancelled")
        raise
    emit(dict(answer), output, comparison)
    if answer["failed"]:
        raise typer.Exit(FAILED)
