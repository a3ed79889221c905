"""Rate of a workload on a kind, with its source: what `explain`, `offer` and the reasons of placements show.

Benchmarks, rates of other jobs, declarations, times of ended jobs and estimates are never confused: each has its own
source and its own sentence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cluster.catalogue import matches_pattern
from orchestrator.core.step_rates import nearest_rate
from orchestrator.core.throughput import Throughput
from orchestrator.core.timing import duration_text

if TYPE_CHECKING:
    from orchestrator.core.model import Job

UNMEASURED = "unmeasured"

Source = Literal["benchmark", "reported", "declared", "history", "estimated"]


@dataclass(frozen=True, slots=True)
class WorkloadRate:
    """Rate of `devices` devices of a kind together, and its source.

    `unit` is what is counted: the item of a benchmark, `step`, or `job` for the time of a complete job. `low` to `high`
    is the 95 % interval of a benchmark or the 90 % interval of an estimate, else None. `run` is the benchmark run,
    `job` the job that reported it, as the mean of `samples`, and `basis` what an estimate follows from.
    `at_s` (wall clock): time of the measurement. `joules_per_item`: 0 if not measured.
    """

    source: Source
    per_s: float
    unit: str
    devices: int = 1
    low: float | None = None
    high: float | None = None
    run: str = ""
    job: str = ""
    samples: int = 0
    basis: str = ""
    at_s: float | None = None
    joules_per_item: float = 0.0

    def sentence(self, now_s: float) -> str:
        """Return e.g. `measured 1,234 samples/s [1,200, 1,260] 2 h ago in bench-12ab34`. `now_s`: wall clock."""
        on = "one device" if self.devices == 1 else f"{self.devices} devices"
        match self.source:
            case "benchmark":
                return f"measured {self._interval_text()}{self._age(now_s)} in {self.run}"
            case "reported":
                unit = "report" if self.samples == 1 else "reports"
                speed = f"{_number_text(self.per_s)} steps/s on {on}"
                return f"{speed}, reported by job {self.job} ({self.samples} {unit}){self._age(now_s)}; not benchmarked"
            case "declared":
                return f"declared: the job takes {duration_text(1 / self.per_s)} on {on}; not measured"
            case "history":
                return f"jobs of this workload took about {duration_text(1 / self.per_s)} on {on} here"
        return f"estimated {self._interval_text()} from {self.basis}; not measured here"

    def _interval_text(self) -> str:
        bounds = ", ".join(_number_text(bound) for bound in (self.low, self.high) if bound is not None)
        return f"{_number_text(self.per_s)} {self.unit}s/s [{bounds}]"

    def _age(self, now_s: float) -> str:
        return "" if self.at_s is None else f" {_ago(now_s - self.at_s)}"


def best_rate(
    job: "Job", candidate: int, kind: str, devices: int, throughput: Throughput, durations: Mapping[str, float]
) -> WorkloadRate | None:
    """Return the best rate of a candidate on `devices` devices of `kind` in total.

    In this order: benchmark, other jobs, the job's own declaration, ended jobs, estimate. `durations`:
    device-seconds of ended jobs of the workload, by kind.
    """
    return (
        from_benchmark(job, candidate, kind, throughput)
        or from_step_rates(job, candidate, kind, devices, throughput)
        or from_declaration(job, kind)
        or from_durations(kind, durations)
        or from_estimate(job, candidate, kind, throughput)
    )


def from_benchmark(job: "Job", candidate: int, kind: str, throughput: Throughput) -> WorkloadRate | None:
    if (row := throughput.of(job, candidate, kind)) is None:
        return None
    return WorkloadRate(
        "benchmark",
        row.items_per_s,
        row.item,
        low=row.low,
        high=row.high,
        run=row.run,
        at_s=row.at_s,
        joules_per_item=row.joules_per_item,
    )


def from_step_rates(job: "Job", candidate: int, kind: str, devices: int, throughput: Throughput) -> WorkloadRate | None:
    """Return the rate that a job of the workload reported on the most similar number of devices."""
    if (nearest := nearest_rate(throughput.reported(job, candidate), kind, devices)) is None:
        return None
    count, rate = nearest
    return WorkloadRate("reported", rate.steps_per_s, "step", count, job=rate.job, samples=rate.samples, at_s=rate.at_s)


def from_declaration(job: "Job", kind: str) -> WorkloadRate | None:
    if not job.work.hours or not matches_pattern(job.work.on, kind):
        return None
    return WorkloadRate("declared", 1 / max(job.work.hours * 3600, 1.0), "job")


def from_durations(kind: str, durations: Mapping[str, float]) -> WorkloadRate | None:
    return WorkloadRate("history", 1 / took_s, "job") if (took_s := durations.get(kind, 0.0)) > 0 else None


def from_estimate(job: "Job", candidate: int, kind: str, throughput: Throughput) -> WorkloadRate | None:
    if (row := throughput.estimated(job, candidate, kind)) is None:
        return None
    return WorkloadRate("estimated", row.items_per_s, row.item, low=row.low, high=row.high, basis=row.source)


def _number_text(rate: float) -> str:
    """Return a rate with four significant digits and without an exponent: `12,340`."""
    if rate < 1000:
        return f"{rate:.4g}"
    digits = len(str(int(rate))) - 4
    return f"{round(rate, -digits):,.0f}"


def _ago(seconds: float) -> str:
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / unit_s:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"
