"""Rates of running jobs, for other jobs of their workload: steps per second by kind and number of devices.

A step is the same work only for jobs of one workload, task and precision with the same batch size. Messages
call these rates reported by their job, never measured or benchmarked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.catalogue.precision import short_name

if TYPE_CHECKING:
    from orchestrator.core.model import Candidate, Job

WorkloadKey = tuple[str, str, str, int, bool]
"""Workload, task, precision, batch size (0: the task's default), whether that is the batch of all ranks together."""

KindCount = tuple[str, int]
"""Kind, and number of devices on all nodes."""


@dataclass(frozen=True, slots=True)
class StepRate:
    """Steps per second of all devices together: the mean of `samples` intervals of `job` until `at_s` (wall clock)."""

    steps_per_s: float
    job: str
    at_s: float
    samples: int = 1


WorkloadRates = Mapping[KindCount, StepRate]
ReportedRates = Mapping[WorkloadKey, WorkloadRates]


def workload_key(job: "Job", want: "Candidate") -> WorkloadKey | None:
    """Return the key of a candidate's rates, None for a job without a workload and without a folder."""
    if not job.workload:
        return None
    return job.workload, job.task, short_name(want.precision), want.batch_size, want.whole_batch


def nearest_rate(rates: WorkloadRates, kind: str, devices: int) -> tuple[int, StepRate] | None:
    """Return (its number of devices, the rate) that was reported on `kind` with the most similar number of devices."""
    counts = [count for at, count in rates if at == kind]
    if not counts:
        return None
    count = min(counts, key=lambda n: (max(devices / n, n / devices), n))
    return count, rates[kind, count]
