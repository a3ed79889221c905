"""`polyfleet benchmark …`: measure the fleet, show results, compare them with earlier runs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.errors import UserError
from orchestrator.cli.measurement import benchmark_reports as reports
from orchestrator.cli.measurement.benchmark_reports import Run
from orchestrator.cli.terminal import completion_values
from orchestrator.cli.terminal.output import Format, Output, emit, print_message, progress_line, write

app = typer.Typer(
    help="Compare back ends across the fleet, with numbers to rely on.", no_args_is_help=True, rich_markup_mode=None
)
PROBLEM_EXIT_CODE = 1
PROBLEMS = ("failed", "wrong", "lost")


class Scale(StrEnum):
    quick = "quick"
    full = "full"


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@app.command("list")
def list_(
    patterns: Annotated[
        list[str] | None, typer.Argument(metavar="[CASE]...", help="Case names, suites or patterns (default: all)")
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="Comma-separated kernel implementations; the first is the reference")
    ] = "",
    scale: Annotated[
        Scale, typer.Option(help="Input sizes: `quick` fits a CPU, `full` an accelerator", show_choices=True)
    ] = Scale.quick,
    output: Output = Format.TABLE,
) -> None:
    """List the cases with their operations and bytes."""
    from orchestrator.show.benchmark import cases
    from workers.benchmark.cases import catalogue

    chosen = catalogue.choose(patterns or ["all"], scale.value)
    emit([case.to_plain() | {"bytes_fp32": case.bytes(4)} for case in chosen], output, cases)


@app.command()
def run(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CASE|ENTRY]...",
            help="Cases, suites (operations, models, transfers, smoke, all) or patterns such as 'gpt2/*'; or the"
            " function that creates your own model, file.py:function or module:function; or transformers:bert,"
            " transformers:config.json",
        ),
    ] = None,
    working_dir: Annotated[str, typer.Option(help="Folder to upload; required when ENTRY is in a file")] = "",
    sample_input: Annotated[str, typer.Option(help="Function that returns one input batch, as module:function")] = "",
    batch_size: Annotated[int, typer.Option(help="Batch size passed to sample_input (default: 1)", min=0)] = 0,
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="Also measure the training step of the model")
    ] = True,
    workload: Annotated[str, typer.Option(help="Workload name in the results (default: ENTRY)")] = "",
    pools: Annotated[
        str,
        typer.Option(
            help="Comma-separated pools to measure; the first is the reference",
            autocompletion=completion_values.pools,
        ),
    ] = "",
    kinds: Annotated[
        str, typer.Option(help="Comma-separated device kinds to measure", autocompletion=completion_values.kinds)
    ] = "",
    precision: Annotated[str, typer.Option(help="Comma-separated precisions: fp32, bf16, fp16")] = "fp32",
    level: Annotated[str, typer.Option(help="Comma-separated optimization levels: O0, O1, O2, O3")] = "O1",
    regime: Annotated[str, typer.Option(help="Cache states to measure: `hot`, or `hot,cold` for operations")] = "hot",
    kernels: Annotated[
        str, typer.Option(help="Comma-separated kernel implementations; the first is the reference")
    ] = "",
    scale: Annotated[
        Scale, typer.Option(help="Input sizes: `quick` fits a CPU, `full` an accelerator", show_choices=True)
    ] = Scale.quick,
    rounds: Annotated[
        int, typer.Option(help="Minimum rounds per case (0: chosen from the number of comparisons)", min=0)
    ] = 0,
    max_rounds: Annotated[int, typer.Option(help="Maximum rounds per case", min=1)] = 60,
    case_seconds: Annotated[float, typer.Option(help="Maximum seconds per case, warm-up included")] = 30.0,
    max_minutes: Annotated[float, typer.Option(help="Maximum minutes of the run; later cases are skipped")] = 60.0,
    seed: Annotated[int, typer.Option(help="Random seed for weights, inputs and measuring order", min=0)] = 0,
    all_devices: Annotated[
        bool, typer.Option("--all-devices", help="Measure every device instead of one per kind")
    ] = False,
    priority: Annotated[int, typer.Option(help="Queue priority of the run's jobs")] = 0,
    key: Annotated[str, typer.Option("--key", help="Idempotency key: a run with the same key starts once")] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Print the run id and return without waiting")] = False,
    local: Annotated[
        str,
        typer.Option(
            help="Comma-separated back ends of this machine to measure without a fleet",
            autocompletion=completion_values.backends,
        ),
    ] = "",
    save: Annotated[Path | None, typer.Option(help="File to which the result lines are also written")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Measure cases, or your own model, on one device of every kind, in interleaved rounds with confidence intervals.

    Exit code 1 if a result failed, was lost or is wrong.
    """
    request = _request(
        patterns or ["all"], sample_input=sample_input, batch_size=batch_size, train=train, workload=workload,
        pools=_split_names(pools), kinds=_split_names(kinds), precisions=_split_names(precision),
        levels=_split_names(level), regimes=_split_names(regime), kernels=_split_names(kernels), scale=scale.value,
        rounds=rounds, max_rounds=max_rounds, case_s=case_seconds, max_minutes=max_minutes,
        seed=seed, all_devices=all_devices, priority=priority,
    )  # fmt: skip
    if local:
        lines = _measure_locally(request, _split_names(local))
    else:
        measured = _measure_fleet(request, working_dir, (key, detach), output)
        if measured is None:
            return
        lines = measured
    if save:
        _save(lines, save)
    _emit_summary(lines, output)


def _request(patterns: list[str], **options: Any) -> dict[str, Any]:
    """Fields of the request; the suite has defaults for the others. An argument with a colon is a model's entry."""
    entries = [pattern for pattern in patterns if ":" in pattern]
    if len(entries) > 1 or (entries and len(patterns) > 1):
        raise UserError("a run measures either cases or one model", "start a separate run for each model")
    subject = {"entry": entries[0]} if entries else {"cases": patterns}
    return subject | {name: value for name, value in options.items() if value not in ("", [], None)}


def _measure_fleet(
    request: dict[str, Any], working_dir: str, how: tuple[str, bool], output: Format
) -> list[dict[str, Any]] | None:
    """Start a run on the fleet and wait for its result lines. `how`: the idempotency key ("": a new one), and whether
    to return None once the run has started.
    """
    from orchestrator.client.client import connect
    from orchestrator.show.benchmark import view
    from orchestrator.submission import benchmark_client as run_client

    with connect(progress=print_message) as client, progress_line("benchmark") as update:
        key, detach = how
        started = run_client.start_run(client, request, working_dir, key)
        if detach:
            if output is Format.TABLE:
                write(started["run"])
            else:
                emit(started, output, view)
            return None
        try:
            ended = run_client.wait_for_run(client, started["run"], update)
        except KeyboardInterrupt:
            print_message(
                f"Run {started['run']} has not ended. Stop it with `polyfleet benchmark cancel {started['run']}`"
            )
            raise
        if ended["state"] != "SUCCEEDED":
            print_message(f"{ended['run']}: {ended['state'].lower()}: {ended['reason']}")
        return run_client.fetch_lines(client, started["run"])


def _measure_locally(request: dict[str, Any], backends: list[str]) -> list[dict[str, Any]]:
    from orchestrator.benchmark.local_run import measure

    with progress_line("benchmark") as update:
        return measure(request, backends, update)


def _save(lines: list[dict[str, Any]], path: Path) -> None:
    from orchestrator.benchmark.export import to_jsonl

    try:
        path.write_text(to_jsonl(lines))
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}", "name another file") from None


def _emit_summary(lines: list[dict[str, Any]], output: Format) -> None:
    from orchestrator.benchmark.results import summarize
    from orchestrator.show.benchmark import report as show_report

    summary = summarize(lines)
    emit(reports.with_cells(summary) if output is Format.JSON else summary, output, show_report)
    if summary["lost"] or any(result["status"] in PROBLEMS for result in summary["results"]):
        raise typer.Exit(PROBLEM_EXIT_CODE)


@app.command("runs")
def runs(output: Output = Format.TABLE) -> None:
    """List the benchmark runs of this server."""
    from orchestrator.client.client import connect
    from orchestrator.show.benchmark import runs as show_runs

    with connect(progress=print_message) as client:
        emit(client.benchmarks.list(), output, show_runs)


@app.command()
def show(run: Run, output: Output = Format.TABLE) -> None:
    """Show the state of a run and the jobs that reserve its nodes."""
    from orchestrator.client.client import connect
    from orchestrator.show.benchmark import view

    with connect(progress=print_message) as client:
        run_view = client.benchmarks.show(run)
    emit(reports.with_cells(run_view) if output is Format.JSON else run_view, output, view)


@app.command()
def cancel(run: Run, output: Output = Format.TABLE) -> None:
    """Stop a run. Results measured so far remain."""
    from orchestrator.client.client import connect
    from orchestrator.show.benchmark import view

    with connect(progress=print_message) as client:
        emit(client.benchmarks.cancel(run), output, view)


for command in (reports.report, reports.compare, reports.baseline, reports.gate, reports.history):
    app.command()(command)
