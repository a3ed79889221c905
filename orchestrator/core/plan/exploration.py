"""Limit how long jobs of a workload may use unmeasured kinds before measured kinds come first."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from orchestrator.core.jobs.expected_duration import in_state_s
from orchestrator.core.jobs.remaining_time import attained
from orchestrator.core.model import Job, Progress, Running, Snapshot
from orchestrator.core.plan.options.gang import PlacementOption
from orchestrator.core.throughput import workload_name

MIN_COUNTED_S = 300.0
"""Minimum seconds counted per device of a live attempt, so that jobs started together use up the limit together."""

Name = tuple[str, str]


class Exploration:
    """Device-seconds of exploration, updated while a plan is made. Those of live jobs are computed at first use."""

    def __init__(self, snapshot: Snapshot):
        self._snapshot = snapshot
        self._live: dict[Name, dict[str, float]] | None = None
        self._started: list[tuple[Job, Mapping[str, float]]] = []

    def explored_kinds(self, job: Job, options: Iterable[PlacementOption]) -> frozenset[str]:
        """Return kinds on which jobs of the workload have used up the policy's device-seconds of exploration."""
        ended, live = self._snapshot.history.all_runs_of(job), self._spent().get(_name(job), {})
        kinds = {option.nodes[0].kind for option in options}
        limit_s = self._snapshot.explore_device_s
        return frozenset(kind for kind in kinds if ended.get(kind, 0.0) + live.get(kind, 0.0) >= limit_s)

    def count_start(self, job: Job, option: PlacementOption) -> None:
        device_s = {option.nodes[0].kind: MIN_COUNTED_S * option.count * len(option.nodes)}
        if self._live is None:
            self._started.append((job, device_s))
        else:
            self._count(job, device_s)

    def _spent(self) -> dict[Name, dict[str, float]]:
        if self._live is None:
            self._live = {}
            for job in self._snapshot.jobs:
                if job.id in self._snapshot.progress:
                    self._add(job, None)
            for attempt in self._snapshot.running:
                if attempt.spec is not None:
                    self._add(attempt.spec, attempt)
            for job, device_s in self._started:
                self._count(job, device_s)
        return self._live

    def _add(self, job: Job, attempt: Running | None) -> None:
        ran_s = max(MIN_COUNTED_S, in_state_s(job.id, self._snapshot)) if attempt else 0.0
        self._count(job, attained(self._snapshot.progress.get(job.id, Progress()), attempt, ran_s))

    def _count(self, job: Job, device_s: Mapping[str, float]) -> None:
        if device_s:
            totals = self._spent().setdefault(_name(job), defaultdict(float))
            for kind, seconds in device_s.items():
                totals[kind] += seconds


def _name(job: Job) -> Name:
    """Return the key of a job's workload. A job without a workload or folder has a key of its own."""
    return workload_name(job) or f"job:{job.id}", job.task
