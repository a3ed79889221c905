"""Read and check traces of jobs, and their rates on each kind of device.

Errors are raised before anything runs, with the file, the row (the header is row 1) and the field.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.errors import UserError, nearest
from orchestrator.simulation.fleets import Fleet
from orchestrator.simulation.rows import MAX_DIGITS, RATE, Row, rows

TRACE_COLUMNS = ("job_id", "arrival_time_s", "job_type", "scale_factor", "total_steps")
THROUGHPUT_COLUMNS = ("job_type", "scale_factor")
MAX_TIME_S = 1e10
"""About 300 years: up to this, times are exact to the microsecond."""

Rates = dict[tuple[str, int], list[float]]


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in the order of submission. All fields are (jobs,), except `rate` (kinds, jobs).

    `rate`: steps per second of the full gang of `gang` devices, 0 where it cannot run. `arrival_s`: seconds since the
    first submission. `priority`: strict tiers, higher ones first; None: all equal. `unsaved`: jobs without checkpoints,
    which the planner never stops and which start again from the beginning if their node fails; None: there is none.
    """

    name: str
    job_id: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    gang: NDArray[np.int64]
    steps: NDArray[np.float64]
    rate: NDArray[np.float64]
    priority: NDArray[np.int64] | None = None
    unsaved: NDArray[np.bool_] | None = None

    @property
    def jobs(self) -> int:
        return len(self.job_id)

    @property
    def isolated_s(self) -> NDArray[np.float64]:
        """(jobs,) seconds alone on the fastest kind: no scheduler can finish a job sooner."""
        return np.asarray(self.steps / self.rate.max(axis=0))


def read_throughputs(path: Path, fleet: Fleet) -> Rates:
    """Map (job type, devices of the gang) to steps per second on each kind; 0 where it cannot run."""
    rates_of_gang: Rates = {}
    first_row: dict[tuple[str, int], int] = {}
    for row in rows(path, THROUGHPUT_COLUMNS, fleet.kinds):
        key = row.text("job_type"), row.integer("scale_factor", 1)
        if key in rates_of_gang:
            message = f"{key[0]!r} with scale_factor {key[1]} is in row {first_row[key]} already"
            raise row.error("job_type", message, "remove one of the two rows")
        first_row[key] = row.number
        rates_of_gang[key] = [row.number_of(f"{kind}{RATE}", blank=0.0) for kind in fleet.kinds]
    return rates_of_gang


def read_trace(path: Path, rates: Rates, fleet: Fleet) -> Trace:
    first_row: dict[int, int] = {}
    jobs = []
    for row in rows(path, TRACE_COLUMNS):
        job = row.integer("job_id", 0)
        if job in first_row:
            raise row.error("job_id", f"job {job} is in row {first_row[job]} already", "give each job a unique id")
        first_row[job] = row.number
        steps, rate_of_job = row.number_of("total_steps", above_zero=True), _rates_of(row, rates, fleet)
        if steps > MAX_TIME_S * max(rate_of_job):
            max_steps = MAX_TIME_S * max(rate_of_job)
            raise row.error("total_steps", "the job would run for centuries", f"the maximum is {max_steps:g}")
        arrival_s = row.number_of("arrival_time_s", most=MAX_TIME_S)
        jobs.append((arrival_s, job, row.integer("scale_factor", 1), steps, rate_of_job))
    jobs.sort(key=lambda job: job[0])
    submitted_s, ids, gangs, steps_of, rate = map(np.array, zip(*jobs, strict=True))
    return Trace(path.name, ids, submitted_s - submitted_s[0], gangs, steps_of, rate.T)


def read_window(text: str, trace: Trace) -> NDArray[np.bool_]:
    """(jobs,) mask of jobs with an id from a to below b, for the text `a:b`. Raises UserError."""
    start, colon, stop = (part.strip() for part in text.partition(":"))
    first, end = int(trace.job_id.min()), int(trace.job_id.max()) + 1
    if not (
        colon and all(number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS for number in (start, stop))
    ):
        raise UserError(f"--window: {text!r} is not a:b with two integers", f"write it like {first}:{end}")
    a, b = int(start), int(stop)
    in_window = np.asarray((trace.job_id >= a) & (trace.job_id < b))
    if a < first or b > end or not in_window.any():
        low = min(max(a, first), end - 1)
        valid = f"{low}:{min(max(b, low + 1), end)}"
        raise UserError(
            f"--window: {text} is not within the job ids {first} to {end - 1} of {trace.name}",
            f"the nearest valid window is {valid if _holds(trace, valid) else f'{first}:{end}'}",
        )
    return in_window


def _holds(trace: Trace, window: str) -> bool:
    a, b = map(int, window.split(":"))
    return bool(((trace.job_id >= a) & (trace.job_id < b)).any())


def _rates_of(row: Row, rates: Rates, fleet: Fleet) -> list[float]:
    """Rates of the row's job, 0 on kinds with too few devices.

    Raises UserError if the fleet can never run it.
    """
    job_type, gang = row.text("job_type"), row.integer("scale_factor", 1)
    if (job_type, gang) not in rates:
        raise _unknown(row, job_type, gang, rates)
    measured = rates[job_type, gang]
    able = {kind: int(count) for kind, count, rate in zip(fleet.kinds, fleet.devices, measured, strict=True) if rate}
    if not able:
        message = f"no kind of the fleet ({', '.join(fleet.kinds)}) runs {job_type!r} with scale_factor {gang}"
        raise row.error("job_type", message, "add a kind to --fleet that runs it, or remove the job")
    if gang > max(able.values()):
        available = ", ".join(f"{kind}={count}" for kind, count in able.items())
        remedy = f"the nearest valid is {max(able.values())}, or a fleet with {gang} devices of one of these kinds"
        raise row.error("scale_factor", f"{gang} devices of one kind are more than the fleet's {available}", remedy)
    return [rate if gang <= count else 0.0 for rate, count in zip(measured, fleet.devices, strict=True)]


def _unknown(row: Row, job_type: str, gang: int, rates: Rates) -> UserError:
    gangs = sorted(size for name, size in rates if name == job_type)
    if not gangs:
        types = list(dict.fromkeys(name for name, _ in rates))
        return row.error("job_type", f"{job_type!r} is not in the throughputs", nearest(job_type, types))
    nearest_size = min(gangs, key=lambda size: abs(size - gang))
    message = f"the throughputs have no {job_type!r} with scale_factor {gang}"
    return row.error("scale_factor", message, f"the nearest is {nearest_size}; valid: {', '.join(map(str, gangs))}")
