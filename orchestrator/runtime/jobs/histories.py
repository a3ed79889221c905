"""History of jobs for the planner, from the store: device-seconds of finished ones by workload, task and kind, and the
metrics from which a starting server computes the rates of their workloads.
"""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from statistics import median
from typing import Any

from orchestrator.core.jobs.fold import Record
from orchestrator.core.jobs.progress import device_seconds_by_kind
from orchestrator.core.states import TERMINAL, State
from orchestrator.core.throughput import History, folder_workload
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.store.events.event_store import EventStore

MEDIAN_OF = 20
"""Number of newest jobs for the median."""
AT_START = 500
WORKLOADS = 10_000

METRICS_OF = 200
"""Number of newest ended jobs whose metrics are read at the start, beside those of open jobs."""
MAX_ROWS = 32
"""Number of newest rows of each: older ones have little weight in a rate (core/jobs/progress.py)."""

Key = tuple[str, str]


def newest_metrics(jobs: Jobs, store: EventStore) -> Iterator[tuple[Record, list[dict[str, Any]]]]:
    """Yield the newest metrics of the jobs that ended last and of the open ones, in this order."""
    for record in (*jobs.page(TERMINAL, limit=METRICS_OF).records, *jobs.open()):
        if record.attempts and (rows := store.metrics.read(record.job.id, limit=MAX_ROWS, newest=True)):
            yield record, rows


class Histories:
    """Cost of finished jobs: those in the store at the start, and each that finishes later. Thread-safe."""

    def __init__(self, jobs: Jobs):
        self._jobs = jobs
        self._lock = threading.Lock()
        self._has_started = False
        self._device_s: OrderedDict[Key, dict[str, deque[float]]] = OrderedDict()
        self._medians: dict[Key, dict[str, float]] = {}
        self._spent_device_s: OrderedDict[Key, Counter[str]] = OrderedDict()
        self._newest = History()

    def newest(self) -> History:
        with self._lock:
            if new := self._finished():
                for record in new:
                    self._add(record)
                self._newest = History(
                    dict(self._medians), {key: dict(spent) for key, spent in self._spent_device_s.items()}
                )
            return self._newest

    def _finished(self) -> list[Record]:
        """Jobs that finished since the last call; at the first call, the newest in the store. Oldest first."""
        new, has_started = self._jobs.finished(), self._has_started
        if not has_started:
            new = self._jobs.page(TERMINAL, limit=AT_START).records
        self._has_started = True
        return new

    def _add(self, record: Record) -> None:
        if device_s_by_kind := device_seconds_by_kind(record.attempts):
            for name in {record.job.workload, folder_workload(record.job.content_sha)} - {""}:
                key = name, record.job.task
                self._count(key, device_s_by_kind)
                if (
                    record.job.state is State.SUCCEEDED and len(device_s_by_kind) == 1
                ):  # with several kinds, the cost of each alone cannot be computed
                    self._add_success(key, *device_s_by_kind.items())

    def _count(self, key: Key, device_s_by_kind: dict[str, float]) -> None:
        self._spent_device_s.setdefault(key, Counter()).update(device_s_by_kind)
        self._spent_device_s.move_to_end(key)
        if len(self._spent_device_s) > WORKLOADS:
            self._spent_device_s.popitem(last=False)

    def _add_success(self, key: Key, on: tuple[str, float]) -> None:
        kind, device_s = on
        by_kind = self._device_s.setdefault(key, {})
        by_kind.setdefault(kind, deque(maxlen=MEDIAN_OF)).append(device_s)
        self._device_s.move_to_end(key)
        self._medians[key] = {kind_name: median(device_times) for kind_name, device_times in by_kind.items()}
        if len(self._device_s) > WORKLOADS:
            del self._medians[self._device_s.popitem(last=False)[0]]
