"""`polyfleet benchmark report|compare|baseline|gate|history`: results of one run, and of runs over time."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.errors import UserError
from orchestrator.cli.terminal.output import Format, Output, emit, print_message, write

Run = Annotated[str, typer.Argument(metavar="RUN|FILE", help="Run id, `latest`, or a file of result lines")]
ALLOW_BUSY_HOST = "Show slowdowns also for hosts that were not idle"
Lines = list[dict[str, Any]]


class ReportFormat(StrEnum):
    table = "table"
    html = "html"
    md = "md"
    json = "json"
    csv = "csv"
    jsonl = "jsonl"
    parquet = "parquet"
    pytest_benchmark = "pytest-benchmark"
    asv = "asv"


def report(
    run: Run = "latest",
    form: Annotated[ReportFormat, typer.Option("--format", show_choices=True)] = ReportFormat.table,
    vs: Annotated[str, typer.Option(metavar="RUN|FILE", help="Earlier run to compare with")] = "",
    beside: Annotated[
        list[str] | None,
        typer.Option(
            "--include", metavar="RUN|FILE", help="Another run to include, e.g. of a machine outside the fleet"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write (default: standard output)")
    ] = None,
) -> None:
    """Print or write the results of a run: table, HTML, Markdown, JSON, CSV, all samples, or another tool's format."""
    from orchestrator.benchmark.results import merge_runs

    lines = merge_runs(_lines(name) for name in (run, *(beside or [])))
    text = _render_report(lines, form, _lines(vs) if vs else None, is_printed=output is None)
    if output is None:
        if isinstance(text, bytes):
            raise UserError("Parquet is a binary format and cannot be printed", "name a file with --output")
        write(text.rstrip("\n"))
        return
    try:
        output.write_bytes(text if isinstance(text, bytes) else text.encode())
    except OSError as e:
        raise UserError(f"{output} cannot be written: {e.strerror}", "name another file") from None
    print_message(f"{output} written")


def _lines(run: str) -> list[dict[str, Any]]:
    from orchestrator.client.client import connect
    from orchestrator.submission import benchmark_client as run_client

    if run_client.is_file(run):
        return run_client.read_lines(Path(run))
    with connect(progress=print_message) as client:
        return run_client.fetch_lines(client, run)


def with_cells(data: Any) -> Any:
    """Add `cells`, the former name of `results`, to what is printed as JSON. Deprecated, until version 0.2.0."""
    return data | {"cells": data["results"]}


def _render_report(lines: Lines, form: ReportFormat, before: Lines | None, is_printed: bool) -> str | bytes:
    from orchestrator.benchmark import export, history
    from orchestrator.benchmark.report import page, text
    from orchestrator.benchmark.results import summarize
    from orchestrator.cli.terminal.output import as_json, render_table
    from orchestrator.show.benchmark import compared as show_comparison
    from orchestrator.show.benchmark import report as show_report
    from orchestrator.show.table import TableStack

    exports: dict[ReportFormat, Callable[[Lines], str | bytes]] = {
        ReportFormat.jsonl: export.to_jsonl,
        ReportFormat.parquet: export.to_parquet,
        ReportFormat.pytest_benchmark: export.to_pytest_benchmark,
        ReportFormat.asv: export.to_asv,
    }
    if form in exports:
        return exports[form](lines)
    summary, comparison = summarize(lines), history.compare(before, lines) if before is not None else None
    match form:
        case ReportFormat.html:
            return page.html(summary, lines, comparison)
        case ReportFormat.md:
            return text.markdown(summary)
        case ReportFormat.csv:
            return text.to_csv(summary)
        case ReportFormat.json:
            data = with_cells(summary) if is_printed else summary
            return as_json(data | ({"since": comparison} if comparison else {}))
    return render_table(TableStack((show_report(summary), *(("", show_comparison(comparison)) if comparison else ()))))


def compare(
    before: Annotated[str, typer.Argument(metavar="RUN|FILE")],
    after: Annotated[str, typer.Argument(metavar="RUN|FILE")],
    allow_busy_host: Annotated[bool, typer.Option("--allow-busy-host", help=ALLOW_BUSY_HOST)] = False,
    output: Output = Format.TABLE,
) -> None:
    """Compare two runs: which results became faster, slower or wrong, and what else changed."""
    from orchestrator.benchmark import history
    from orchestrator.show.benchmark import compared

    emit(history.compare(_lines(before), _lines(after), allow_busy_host), output, compared)


def baseline(run: Run, output: Output = Format.TABLE) -> None:
    """Make a run the baseline of later runs."""
    from orchestrator.client.client import connect
    from orchestrator.show.benchmark import view

    with connect(progress=print_message) as client:
        emit(client.benchmarks.baseline(run), output, view)


def gate(
    run: Run = "latest",
    against: Annotated[
        str,
        typer.Option(metavar="RUN|FILE", help="Baseline run (default: newest of each kind with the same software)"),
    ] = "",
    allow_busy_host: Annotated[bool, typer.Option("--allow-busy-host", help=ALLOW_BUSY_HOST)] = False,
    output: Output = Format.TABLE,
) -> None:
    """Compare a run with its baseline, for CI: exit code 0 same or faster, 1 slower, 2 wrong result, 3 inconclusive."""
    from orchestrator.benchmark import history
    from orchestrator.show.benchmark import compared

    lines = _lines(run)
    comparison = history.compare(_lines(against) if against else _baseline(lines), lines, allow_busy_host)
    emit(comparison | {"exit_code": history.gate(comparison)}, output, compared)
    raise typer.Exit(history.gate(comparison))


def _baseline(lines: Lines) -> Lines:
    from orchestrator.benchmark import baselines
    from orchestrator.client.client import connect
    from orchestrator.submission.benchmark_client import fetch_lines

    with connect(progress=print_message) as client:
        candidates = [fetch_lines(client, view["run"]) for view in client.benchmarks.list() if view["baseline"]]
    return baselines.choose(candidates, lines)


def history(
    case: Annotated[str, typer.Argument(help="Case or workload name")],
    output: Output = Format.TABLE,
) -> None:
    """Show one case over all runs, and the run from which its time changed."""
    from orchestrator.benchmark import history as over_time
    from orchestrator.client.client import connect
    from orchestrator.show.benchmark import series
    from orchestrator.submission.benchmark_client import fetch_lines

    with connect(progress=print_message) as client:
        runs = [fetch_lines(client, view["run"]) for view in client.benchmarks.list() if view["results"]]
    emit(over_time.series(runs, case), output, series)
