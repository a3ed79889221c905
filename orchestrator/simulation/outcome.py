"""Figures of a replayed trace. Completion times are in hours, from submission to end."""

from typing import NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from orchestrator.simulation.fleets import HOUR_S, Fleet
from orchestrator.simulation.replay import Replayed
from orchestrator.simulation.traces import Trace

DIGITS = 6
MIN_DURATION_S = 1e-9
"""Minimum of a duration: floats as clocks resolve no less, and divisions by 0 are avoided."""
Floats = NDArray[np.float64]


class Spread(TypedDict):
    p50: float
    p99: float


class ReplayFigures(TypedDict):
    jobs: int
    policy: str
    mean_jct_h: float
    p50_jct_h: float
    p99_jct_h: float
    isolated_mean_h: float
    window_mean_jct_h: NotRequired[float]
    window_p50_jct_h: NotRequired[float]
    window_p99_jct_h: NotRequired[float]
    window_isolated_mean_h: NotRequired[float]
    makespan_h: float
    utilisation: float
    restarts: float
    worst_finish_time_ratio: float
    planning_cpu_ms: Spread
    events_per_s: float
    faults: NotRequired[int]
    interruptions: NotRequired[int]
    lost_device_h: NotRequired[float]


def outcome(
    trace: Trace, fleet: Fleet, policy: str, replayed: Replayed, window: NDArray[np.bool_] | None = None
) -> ReplayFigures:
    """Compute the figures. `window` (jobs,): jobs that the `window_*` figures are about."""
    jct_h = (replayed.end_s - trace.arrival_s) / HOUR_S
    isolated_h = trace.isolated_s / HOUR_S
    figures: ReplayFigures = {
        "jobs": trace.jobs,
        "policy": policy,
        "mean_jct_h": rounded(jct_h.mean()),
        "p50_jct_h": rounded(np.percentile(jct_h, 50)),
        "p99_jct_h": rounded(np.percentile(jct_h, 99)),
        "isolated_mean_h": rounded(isolated_h.mean()),
        "makespan_h": rounded(replayed.end_s.max() / HOUR_S),
        "utilisation": rounded(utilisation(fleet, replayed)),
        "restarts": rounded(len(replayed.stays.job) / trace.jobs),
        "worst_finish_time_ratio": rounded(finish_time_ratios(trace, fleet, replayed).max()),
        "planning_cpu_ms": {
            "p50": rounded(np.percentile(replayed.planning_s, 50) * 1e3),
            "p99": rounded(np.percentile(replayed.planning_s, 99) * 1e3),
        },
        "events_per_s": rounded(2 * trace.jobs / replayed.wall_s),  # submissions and ends
    }
    if replayed.faults is not None:
        figures["faults"], figures["interruptions"] = replayed.faults.nodes, replayed.faults.stopped
        figures["lost_device_h"] = rounded(replayed.faults.lost_device_s / HOUR_S)
    if window is not None:
        figures["window_mean_jct_h"] = rounded(jct_h[window].mean())
        figures["window_p50_jct_h"] = rounded(np.percentile(jct_h[window], 50))
        figures["window_p99_jct_h"] = rounded(np.percentile(jct_h[window], 99))
        figures["window_isolated_mean_h"] = rounded(isolated_h[window].mean())
    return figures


def utilisation(fleet: Fleet, replayed: Replayed) -> float:
    """Share of all device time until the last end that jobs hold, including pauses; 0 to 1."""
    held_s = (np.diff(replayed.at_s)[:, None] * replayed.used[:-1]).sum()
    return float(held_s / (fleet.devices.sum() * max(replayed.end_s.max(), MIN_DURATION_S)))


def finish_time_ratios(trace: Trace, fleet: Fleet, replayed: Replayed) -> Floats:
    """(jobs,) completion time divided by that with the job's fair share of the fleet.

    The share is 1/n of each kind, with n the mean number of jobs in the system from the job's submission to its end. A
    ratio of at most 1: the job lost nothing by sharing the fleet.
    Source: Themis (NSDI 2020), rho = T_shared / T_independent; the share of rigid gangs as in `fair_rate`.
    """
    shared_s = replayed.end_s - trace.arrival_s
    fair_s = trace.steps / fair_rate(trace, fleet, mean_present(trace, replayed))
    return np.asarray(np.maximum(shared_s, MIN_DURATION_S) / np.maximum(fair_s, MIN_DURATION_S))


def mean_present(trace: Trace, replayed: Replayed) -> Floats:
    """(jobs,) mean number of jobs in the system from a job's submission to its end, including itself."""
    lasted_s = np.diff(replayed.at_s)
    area = np.concatenate(([0.0], np.cumsum(lasted_s * replayed.present[:-1])))
    stayed = np.interp(replayed.end_s, replayed.at_s, area) - np.interp(trace.arrival_s, replayed.at_s, area)
    return np.maximum(stayed / np.maximum(replayed.end_s - trace.arrival_s, MIN_DURATION_S), 1.0)


def fair_rate(trace: Trace, fleet: Fleet, present: Floats) -> Floats:
    """(jobs,) steps per second with 1/n of each kind's devices.

    A gang that needs more devices than that has all of them for a part of the time, on one kind at a time: first on its
    fastest kind, then on the others for the rest of the time.
    """
    fastest = np.argsort(-trace.rate, axis=0, kind="stable")
    part = fleet.devices[fastest] / (present * trace.gang)
    cumulative = np.minimum(np.cumsum(part, axis=0), 1.0)
    time_on = np.diff(cumulative, axis=0, prepend=0.0)
    return np.asarray((time_on * np.take_along_axis(trace.rate, fastest, axis=0)).sum(axis=0))


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
