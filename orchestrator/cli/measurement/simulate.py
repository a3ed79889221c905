"""`polyfleet simulate`: replay a trace of jobs, or a server's own log, on a simulated fleet."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.errors import UserError
from orchestrator.cli.jobs.jobs import parse_moment
from orchestrator.cli.terminal.output import Format, Output, emit, print_message, progress_line

if TYPE_CHECKING:
    from orchestrator.show.table import TextTable
    from orchestrator.simulation.fleets import Fleet
    from orchestrator.simulation.log_trace import PastJobs
    from orchestrator.simulation.outcome import ReplayFigures
    from orchestrator.simulation.replay import Replayed
    from orchestrator.simulation.traces import Trace

POLICIES = "fifo, priority, finish_time, max_min_fairness, makespan or cost."  # numpy is not imported for the help
MAX_RESTART_S, MAX_NOISE = 1e7, 10.0


@dataclass(frozen=True, slots=True)
class SimulationSources:
    """Sources of jobs and fleet as options; "" or None if absent."""

    trace: Path | None
    throughputs: Path | None
    log: str
    since: str
    until: str
    fleet: str
    faults: Path | None


def simulate(
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="CSV file of jobs: arrival times and work")] = None,
    throughputs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV file of rates: job type, gang size, rate per kind")
    ] = None,
    log: Annotated[
        str, typer.Option(metavar="PATH", help="Jobs of a server instead of a trace: its home, database or backup")
    ] = "",
    fleet: Annotated[
        str,
        typer.Option(metavar="KIND=N,...", help="Devices per kind, e.g. v100=36,k80=36, or a YAML file of nodes"),
    ] = "",
    policy: Annotated[str, typer.Option(help=POLICIES)] = "finish_time",
    restart_cost: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Seconds without progress at each start, resume or move (default: 0, or as logged)"
        ),
    ] = None,
    noise: Annotated[
        float, typer.Option(metavar="SIGMA", help="Log-normal error of the remaining work that the planner assumes")
    ] = 0.0,
    window: Annotated[str, typer.Option(metavar="A:B", help="Also print figures for job ids from A to below B")] = "",
    since: Annotated[str, typer.Option(help="Earliest submission in the log: an age (7d) or a day")] = "",
    until: Annotated[str, typer.Option(help="Latest submission in the log: an age (1d) or a day (2026-11-20)")] = "",
    faults: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file of node failures: rates and durations")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the noise", min=0)] = 0,
    controller: Annotated[
        bool,
        typer.Option("--controller", help="Replay with the full controller on nodes (slower)"),
    ] = False,
    per_node: Annotated[
        int | None,
        typer.Option(metavar="N", help="Devices per node, with --controller (default: 8)"),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for utilisation.svg, jct.svg and queue.svg")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Replay a trace of jobs on a simulated fleet: completion times, makespan, restarts, utilisation."""
    _check_number("--restart-cost", restart_cost or 0.0, MAX_RESTART_S)
    _check_number("--noise", noise, MAX_NOISE)
    sources = SimulationSources(trace, throughputs, log, since, until, fleet, faults)
    _check_sources(sources)
    _check_controller(controller, per_node, noise)
    from orchestrator.simulation import controller_replay, replay, traces
    from orchestrator.simulation.outcome import outcome

    replay.check_policy(policy)
    jobs, devices, past = _load_log(sources) if log else _load_files(sources)
    if controller:
        devices = controller_replay.on_nodes(devices, per_node)
    job_window = traces.read_window(window, jobs) if window else None
    if restart_cost is None:
        restart_cost = past.starts_s if past else 0.0
    if plots is not None:
        _make_folder(plots)
    with progress_line(f"simulating {jobs.jobs} jobs"):
        if controller:
            replayed = controller_replay.replay_controlled(jobs, devices, policy, restart_cost)
        else:
            replayed = replay.replay(jobs, devices, policy, restart_cost, noise, seed)
    if plots is not None:
        _draw(jobs, devices, replayed, plots)
    result = outcome(jobs, devices, policy, replayed, job_window)
    if past is not None:
        from orchestrator.simulation.log_trace import with_log_figures

        result = with_log_figures(result, past, restart_cost)
    emit(result, output, _table)


def _check_sources(sources: SimulationSources) -> None:
    if bool(sources.log) == bool(sources.trace):
        problem = "both --trace and --log are present" if sources.log else "--trace or --log is missing"
        raise UserError(problem, "name a CSV file with --trace, or a server's home with --log")
    wrong = "--throughputs" if sources.log and sources.throughputs else ""
    wrong = wrong or (
        "--since" if sources.trace and sources.since else "--until" if sources.trace and sources.until else ""
    )
    if wrong:
        raise UserError(
            f"{wrong} cannot be combined with {'--log' if sources.log else '--trace'}", f"leave {wrong} out"
        )


def _check_controller(controller: bool, per_node: int | None, noise: float) -> None:
    if per_node is not None and not (controller and per_node >= 1):
        raise UserError(f"--per-node {per_node} is not valid here", "write 1 or more, together with --controller")
    if controller and noise:
        raise UserError("--noise cannot be combined with --controller", "leave one of them out")


def _load_files(sources: SimulationSources) -> "tuple[Trace, Fleet, PastJobs | None]":
    from orchestrator.simulation import fleets, traces

    if sources.trace is None or sources.throughputs is None or not sources.fleet:
        missing = "--fleet" if sources.throughputs else "--throughputs"
        raise UserError(f"{missing} is missing", f"--trace needs --throughputs and --fleet; add {missing}")
    fleet = fleets.read_fleet(sources.fleet)
    if sources.faults is not None:
        fleet = fleets.add_failures(fleet, sources.faults)
    return traces.read_trace(sources.trace, traces.read_throughputs(sources.throughputs, fleet), fleet), fleet, None


def _load_log(sources: SimulationSources) -> "tuple[Trace, Fleet, PastJobs | None]":
    """Read jobs from a log. Without `--fleet`, the fleet is the one that they used; its failures are those of
    `--faults`.
    """
    from dataclasses import replace

    from orchestrator.simulation import fleets
    from orchestrator.simulation.log_trace import convert_log
    from orchestrator.simulation.logs import read_log

    since_s = parse_moment(sources.since) if sources.since else -float("inf")
    until_s = parse_moment(sources.until, "--until") if sources.until else float("inf")
    fleet = fleets.read_fleet(sources.fleet) if sources.fleet else None
    if fleet and sources.faults is not None:
        fleet = fleets.add_failures(fleet, sources.faults)
    with progress_line("reading the log"):
        replayed = convert_log(read_log(sources.log), fleet, since_s, until_s)
    if not fleet and sources.faults is not None:
        replayed = replace(replayed, fleet=fleets.add_failures(replayed.fleet, sources.faults))
    return replayed.trace, replayed.fleet, replayed


def _check_number(option: str, value: float, maximum: float) -> None:
    if not 0 <= value <= maximum:
        nearest = maximum if value > maximum else 0
        raise UserError(
            f"{option}: {value:g} is not a number from 0 to {maximum:g}", f"the nearest valid is {nearest:g}"
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--plots: {folder} cannot be created: {e.strerror}", "name another folder") from None


def _draw(trace: "Trace", fleet: "Fleet", replayed: "Replayed", folder: Path) -> None:
    from orchestrator.simulation.charts import pictures

    for name, text in pictures(trace, fleet, replayed).items():
        try:
            (folder / name).write_text(text)
        except OSError as e:
            remedy = "free disk space there, or name another folder"
            raise UserError(f"--plots: {folder / name} cannot be written: {e.strerror}", remedy) from None
        print_message(f"{folder / name} written")


def _table(result: "ReplayFigures") -> "TextTable":
    from orchestrator.show.table import facts

    return facts(dict(result))
