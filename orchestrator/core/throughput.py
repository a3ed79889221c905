"""Measured throughput of workloads by kind, for the planner: rates with confidence intervals and age.

A workload is a name: one of the catalogue's (`gpt2`), one that a user chose, or `folder:SHA` after the content of
the job's folder. A training job is matched with training steps, any other with forwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cluster import catalogue
from cluster.catalogue import lookup
from cluster.catalogue.precision import short_name
from orchestrator.core.step_rates import ReportedRates, WorkloadRates, workload_key

if TYPE_CHECKING:
    from orchestrator.core.model import Job

Key = tuple[str, str, str, str]
"""Workload, mode, kind, precision."""


def folder_workload(content_sha: str) -> str:
    """Return the name of a workload that the user did not name: a hash of its folder's content, without file times."""
    return f"folder:{content_sha[:16]}" if content_sha else ""


def with_code(job: "Job", package: str, content_sha: str) -> "Job":
    """Return `job` with its code archive. A workload without a name is named after the archive's content."""
    if not package and not content_sha:  # copying a job takes longer than making one of its candidates
        return job
    workload = job.workload or folder_workload(content_sha)
    return replace(job, workload=workload, package=package, content_sha=content_sha)


def workload_name(job: "Job") -> str:
    """Return the name of the job's workload, else of its folder; "" if it has neither."""
    return job.workload or folder_workload(job.content_sha)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured rate of one device.

    `low` to `high` is the 95 % confidence interval. It was measured at `at_s` in benchmark run `run`. `joules_per_item`
    is 0 if the device has no energy counter.
    """

    items_per_s: float
    low: float
    high: float
    item: str
    run: str
    at_s: float
    joules_per_item: float = 0.0


@dataclass(frozen=True, slots=True)
class Estimated:
    """Estimated rate of one device; `low` to `high` is a 90 % interval.

    It follows from the differences between kinds for `workloads` other workloads (plan/arrays/completion.py), or
    from published figures and the measured rate on kind `measured_kind`.
    """

    items_per_s: float
    low: float
    high: float
    item: str
    workloads: int
    measured_kind: str = ""

    @property
    def source(self) -> str:
        others = f"{self.workloads} other workloads"
        return f"published figures beside {self.measured_kind}, where it was measured" if self.measured_kind else others


@dataclass(frozen=True, slots=True)
class Throughput:
    """Newest measurement by key. `estimates` are for keys without one; they affect only the order of options.

    `step_rates` are those of running and ended jobs, which messages never call measurements of a benchmark.
    """

    rows: Mapping[Key, Measured] = field(default_factory=dict)
    estimates: Mapping[Key, Estimated] = field(default_factory=dict)
    step_rates: ReportedRates = field(default_factory=dict)

    def of(self, job: "Job", candidate: int, kind: str) -> Measured | None:
        return self.rows.get(_key(job, candidate, kind)) if job.workload else None

    def reported(self, job: "Job", candidate: int) -> WorkloadRates:
        """Return the rates that jobs of the workload reported with the settings of this candidate."""
        key = workload_key(job, job.candidates[candidate]) if self.step_rates else None
        return self.step_rates.get(key, {}) if key else {}

    def estimated(self, job: "Job", candidate: int, kind: str) -> Estimated | None:
        if not job.workload:
            return None
        key = _key(job, candidate, kind)
        return self.estimates.get(key) or self._from_figures(key)

    def _from_figures(self, key: Key) -> Estimated | None:
        """Estimate a rate from published figures, based on the fastest comparable kind that was measured."""
        workload, mode, kind, precision = key
        rows = ((other, self.rows.get((workload, mode, other, precision))) for other in catalogue.models())
        comparable = [(row, other) for other, row in rows if row and lookup.speed_ratio(kind, other, precision)]
        if not comparable:
            return None
        best, other = max(comparable, key=lambda pair: pair[0].items_per_s)
        rate = best.items_per_s * (lookup.speed_ratio(kind, other, precision) or 1.0)
        return Estimated(rate, rate / lookup.SPEED_ERROR_FACTOR, rate * lookup.SPEED_ERROR_FACTOR, best.item, 0, other)


def _key(job: "Job", candidate: int, kind: str) -> Key:
    mode = "train" if job.task == "train" else "forward"
    return job.workload, mode, kind, short_name(job.candidates[candidate].precision)


@dataclass(frozen=True, slots=True)
class History:
    """Device-seconds of successful jobs, by kind: the median of the latest ones of each (workload, task).

    `all_runs` is the sum over all ended jobs, whatever their outcome.
    """

    rows: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)
    all_runs: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)

    def of(self, job: "Job") -> Mapping[str, float]:
        by_name = self.rows.get((job.workload, job.task)) if job.workload else None
        return by_name or self.rows.get((folder_workload(job.content_sha), job.task)) or {}

    def all_runs_of(self, job: "Job") -> Mapping[str, float]:
        return self.all_runs.get((workload_name(job), job.task), {})
