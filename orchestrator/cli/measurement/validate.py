"""`polyfleet validate`: check that a model computes the same on several devices."""

from typing import Annotated, Any

import typer

from orchestrator.cli.terminal import completion_values
from orchestrator.cli.terminal.output import Format, Output, emit, print_message, progress_line

DIFFERENT_EXIT_CODE = 1


def validate(
    entry: Annotated[
        str, typer.Argument(help="Function that returns the model, file.py:function, or transformers:TYPE")
    ],
    on: Annotated[
        str,
        typer.Option(
            help="Comma-separated pools or kinds; the first is the reference",
            autocompletion=completion_values.kinds_and_pools,
        ),
    ],
    working_dir: Annotated[str, typer.Option(help="Folder to upload (default: the current folder)")] = "",
    sample_input: Annotated[str, typer.Option(help="Function that returns one input batch, as module:function")] = "",
    batch_size: Annotated[int, typer.Option(help="Batch size passed to sample_input (default: 1)", min=0)] = 0,
    precision: Annotated[str, typer.Option(help="Precision: fp32, bf16 or fp16")] = "",
    steps: Annotated[int, typer.Option(help="Number of training steps to compare", min=0)] = 3,
    seed: Annotated[int, typer.Option(help="Random seed for weights and inputs", min=0)] = 0,
    rtol: Annotated[
        float, typer.Option(help="Maximum relative difference (0: chosen from the rounding error)", min=0)
    ] = 0.0,
    output: Output = Format.TABLE,
) -> None:
    """Compare a model on several devices from the same weights: activations of each layer, loss, gradients, steps.

    Exit code 1 if they differ by more than rounding; the first layer and step that differ are named.
    """
    from orchestrator.client.client import connect
    from orchestrator.show.benchmark import validation
    from orchestrator.spec.entry_check import needs_no_folder
    from orchestrator.submission import numeric_validation

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
    targets = [name.strip() for name in on.split(",") if name.strip()]
    with connect(progress=print_message) as client, progress_line("validating") as update:
        result = numeric_validation.run(client, job, targets, rtol, update)
    emit(result, output, validation)
    if not result["same"]:
        raise typer.Exit(DIFFERENT_EXIT_CODE)
