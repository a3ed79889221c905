"""Rates of jobs, also of ended ones, for other jobs of their workload. Pure."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.jobs.progress import Pace, devices_of
from orchestrator.core.step_rates import StepRate, workload_key

if TYPE_CHECKING:
    from orchestrator.core.controller.draft import Draft

REFRESH_S = 60.0
"""Seconds for which a rate is valid, so that the table does not change with each step.

Then the next job with a rate for the same kind and devices replaces it. Its own job replaces it earlier if it has
changed by more than CHANGE.
"""

CHANGE = 0.05

MAX_WORKLOADS = 10_000
MAX_RATES = 64
"""Maximum number of rates of one workload. The oldest are dropped."""

Data = Mapping[str, Any]


def put_rate(draft: "Draft", record: Record, attempt: Attempt, rate: StepRate) -> None:
    """Store the rate of an attempt of the job. Tables are bounded, the newest entries remain."""
    key = workload_key(record.job, record.candidate_of(attempt))
    if key is None or not 0 < rate.steps_per_s < float("inf"):
        return
    rates, devices = draft.step_rates.get(key) or {}, (attempt.kind, devices_of(attempt))
    present = rates.get(devices)
    if present is not None and 0 <= rate.at_s - present.at_s < REFRESH_S and not _has_changed(present, rate):
        return
    others = [(at, other) for at, other in rates.items() if at != devices][-(MAX_RATES - 1) :]
    draft.step_rates.pop(key)  # the order of the table is that of its changes
    draft.step_rates[key] = {**dict(others), devices: rate}
    if len(draft.step_rates.current) > MAX_WORKLOADS:
        draft.step_rates.pop(next(iter(draft.step_rates)))


def _has_changed(present: StepRate, rate: StepRate) -> bool:
    return present.job == rate.job and abs(rate.steps_per_s / present.steps_per_s - 1) > CHANGE


def restore_rates(draft: "Draft", record: Record, rows: Iterable[Data]) -> None:
    """Compute the rates of a job's attempts from its stored metrics, after a start of the server.

    Each row has `attempt`, `time` (the rank's clock) and `metrics`; the oldest is first.
    """
    attempts = {attempt.epoch: attempt for attempt in record.attempts}
    paces: dict[int, Pace] = {}
    times_s: dict[int, float] = {}
    for row in rows:
        epoch, t, step = row["attempt"], row["time"], row["metrics"].get("step")
        if epoch in attempts and type(step) is int:
            paces[epoch] = paces[epoch].reported(step, t, t) if epoch in paces else Pace(step, t, t, t)
            times_s[epoch] = t
    for epoch, pace in paces.items():
        if (steps_per_s := pace.rate) is not None:
            at_s = min(times_s[epoch], draft.now.wall_s)
            put_rate(draft, record, attempts[epoch], StepRate(steps_per_s, record.job.id, at_s, pace.samples))
