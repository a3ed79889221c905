"""`polyfleet validate`: does a model compute the same on other devices?"""

from typing import Annotated, Any

import typer

from orchestrator.cli import completion_values
from orchestrator.cli.output import Format, Output, emit, print_message, progress_line

DIFFERENT = 1


def validate(
    entry: Annotated[str, typer.Argument(help="What makes the model: file.py:function or transformers:TYPE.")],
    on: Annotated[
        str,
        typer.Option(
            help="Pools or kinds, a,b; others are compared with the first.",
            autocompletion=completion_values.kinds_and_pools,
        ),
    ],
    working_dir: Annotated[str, typer.Option(help="Folder to send along; by default this one.")] = "",
    sample_input: Annotated[str, typer.Option(help="What makes the input: module:function.")] = "",
    batch_size: Annotated[int, typer.Option(help="Batch size passed to sample_input (default 1).", min=0)] = 0,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "",
    steps: Annotated[int, typer.Option(help="Training steps to follow.", min=0)] = 3,
    seed: Annotated[int, typer.Option(help="Random seed of weights and inputs.", min=0)] = 0,
    rtol: Annotated[float, typer.Option(help="Largest relative difference (0: what rounding explains).", min=0)] = 0.0,
    output: Output = Format.TABLE,
) -> None:
    """Activations layer by layer, loss, gradients and training steps on several devices, from the same weights.

    Exit code 1 when they differ beyond rounding; the first layer and step that do are named.
    """
    from orchestrator.benchmark import numeric_validation
    from orchestrator.client import connect
    from orchestrator.entry_check import needs_no_folder
    from orchestrator.show.benchmark import validation

    arguments = {"trace": True, "steps": steps} | ({"sample_input": sample_input} if sample_input else {})
    job: dict[str, Any] = {
        "name": "validate",
        "task": "benchmark",
        "entry": entry,
        "working_dir": working_dir or ("" if needs_no_folder(entry) else "."),
        "arguments": arguments,
    }
    job |= {"precision": precision} if precision else {}
    job |= {"batch_size": batch_size} if batch_size else {}
    job |= {"seed": seed} if seed else {}
    targets = [word.strip() for word in on.split(",") if word.strip()]
    with connect(progress=print_message) as client, progress_line("validating") as update:
        answer = numeric_validation.run(client, job, targets, rtol, update)
    emit(answer, output, validation)
    if not answer["same"]:
        raise typer.Exit(DIFFERENT)
