"""Convert a server's log to a trace, to simulate its jobs with another policy or on another fleet."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from cluster.errors import UserError
from orchestrator.core.jobs.fold import Record
from orchestrator.core.throughput import Throughput
from orchestrator.simulation.fleets import HOUR_S, Fleet
from orchestrator.simulation.job_history import NEVER_RAN, UNREADABLE, JobRun, devices, job_run, largest_fleet, pools_of
from orchestrator.simulation.kind_acceptance import JobRates, KindAcceptance, with_full_names
from orchestrator.simulation.outcome import ReplayFigures, rounded
from orchestrator.simulation.traces import MAX_TIME_S, Trace

MIN_DURATION_S = 1e-3
"""Minimum duration of a job; shorter ones count as this long."""

MAX_PRIORITY = 1 << 31


class AsItWas(TypedDict):
    mean_jct_h: float
    p50_jct_h: float
    p99_jct_h: float
    makespan_h: float


class Skipped(TypedDict):
    """Number of skipped jobs: no attempt started; no kind of the fleet accepts it; its history is damaged."""

    never_ran: int
    no_kind: int
    unreadable: int


class LogReplayFigures(ReplayFigures):
    """Figures of the simulated policy, and of the log itself."""

    as_it_was: AsItWas
    fleet: dict[str, int]
    restart_cost_s: float
    assumed_rates: int
    unfinished: int
    skipped: Skipped


@dataclass(frozen=True, slots=True)
class PastJobs:
    """The jobs of a log as a trace.

    `starts_s`: median seconds from placement to start of attempts. `unfinished`: number of jobs that count as if they
    had ended with the log. `assumed`: number of jobs with a rate that was not measured.
    """

    trace: Trace
    fleet: Fleet
    as_it_was: AsItWas
    starts_s: float
    skipped: Skipped
    unfinished: int
    assumed: int


@dataclass(frozen=True, slots=True)
class JobStoreLog:
    """Contents of a job store.

    `unreadable`: number of jobs without a valid record. `newest_s`: newest event's time.
    """

    name: str
    records: tuple[Record, ...]
    unreadable: int
    throughput: Throughput
    newest_s: float


def convert_log(log: JobStoreLog, fleet: Fleet | None, since_s: float = -np.inf, until_s: float = np.inf) -> PastJobs:
    """Convert jobs submitted from `since_s` until before `until_s`.

    Raises UserError if none can be simulated.

    Without `fleet`, the fleet has the maximum number of devices of each kind that these jobs held at a time.
    """
    converted = [job_run(r, log.newest_s) for r in log.records if since_s <= r.job.submitted_s < until_s]
    jobs = sorted((r for r in converted if isinstance(r, JobRun)), key=lambda r: (r.arrival_s, r.record.job.number))
    if not jobs:
        message = (
            f"none of {len(converted)} jobs of {log.name} ever ran"
            if converted
            else f"{log.name} has no job submitted in that time"
        )
        raise UserError(f"--log: {message}", "name the log of a server whose jobs ran, or another --since or --until")
    pools = pools_of(jobs)
    chosen = with_full_names(fleet, pools) if fleet else largest_fleet(jobs)
    accepting = KindAcceptance(chosen, log.throughput, pools)
    rated = [(job, rated) for job in jobs if any((rated := accepting.rates(job)).rate)]
    if not rated:
        ran_on = sorted({job.longest.kind for job in jobs})
        message = f"no kind of the fleet ({', '.join(chosen.kinds)}) takes any of the {len(jobs)} jobs of {log.name}"
        raise UserError(f"--fleet: {message}", f"they ran on {', '.join(ran_on[:20])}")
    skipped: Skipped = {
        "never_ran": converted.count(NEVER_RAN),
        "no_kind": len(jobs) - len(rated),
        "unreadable": converted.count(UNREADABLE) + log.unreadable,
    }
    accepted = [job for job, _ in rated]
    work_s = [accepting.work_s(job) for job in accepted]
    unfinished = sum(job.is_unfinished for job in accepted)
    trace = _trace(log.name, rated, work_s)
    return PastJobs(
        trace, chosen, _as_it_was(accepted), _starts_s(accepted), skipped, unfinished, sum(r.assumed for _, r in rated)
    )


def with_log_figures(figures: ReplayFigures, past_jobs: PastJobs, restart_s: float) -> LogReplayFigures:
    return {
        **figures,
        "as_it_was": past_jobs.as_it_was,
        "fleet": dict(zip(past_jobs.fleet.kinds, past_jobs.fleet.devices.tolist(), strict=True)),
        "restart_cost_s": restart_s,
        "assumed_rates": past_jobs.assumed,
        "unfinished": past_jobs.unfinished,
        "skipped": past_jobs.skipped,
    }


def _trace(name: str, jobs: list[tuple[JobRun, JobRates]], work_s: list[float]) -> Trace:
    arrival_s = np.array([job.arrival_s for job, _ in jobs])
    priority = np.array([job.record.job.priority for job, _ in jobs], object)
    saves = [job.record.checkpoint is not None or job.record.job.task == "train" for job, _ in jobs]
    return Trace(
        name,
        np.arange(len(jobs)),
        arrival_s - arrival_s[0],
        np.array([devices(job.longest) for job, _ in jobs]),
        np.clip(work_s, MIN_DURATION_S, MAX_TIME_S),
        np.array([rated.rate for _, rated in jobs]).T,
        np.clip(priority, -MAX_PRIORITY, MAX_PRIORITY).astype(np.int64),
        ~np.array(saves),
    )


def _as_it_was(jobs: list[JobRun]) -> AsItWas:
    jct_h = np.array([job.end_s - job.arrival_s for job in jobs]) / HOUR_S
    return {
        "mean_jct_h": rounded(jct_h.mean()),
        "p50_jct_h": rounded(np.percentile(jct_h, 50)),
        "p99_jct_h": rounded(np.percentile(jct_h, 99)),
        "makespan_h": rounded((max(job.end_s for job in jobs) - jobs[0].arrival_s) / HOUR_S),
    }


def _starts_s(jobs: Iterable[JobRun]) -> float:
    durations_s = [max(a.started_s - a.placed_s, 0.0) for job in jobs for a in job.attempts if a.started_s is not None]
    return rounded(float(np.median(durations_s)))
