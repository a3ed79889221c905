"""What jobs took that ended, for the planner: device-seconds by workload, task and kind, from the store."""

import threading
from collections import Counter, OrderedDict, deque
from statistics import median

from orchestrator.core.fold import Record
from orchestrator.core.progress import ran_on
from orchestrator.core.states import TERMINAL, State
from orchestrator.core.throughput import History, of_folder
from orchestrator.runtime.jobs import Jobs

LAST = 20
"""The median is of so many."""
AT_START = 500
WORKLOADS = 10_000

Key = tuple[str, str]


class Histories:
    """Of those in the store at a start, and of each that finishes. Safe to use from many threads."""

    def __init__(self, jobs: Jobs):
        self._jobs = jobs
        self._lock = threading.Lock()
        self._begun = False
        self._took: OrderedDict[Key, dict[str, deque[float]]] = OrderedDict()
        self._rows: dict[Key, dict[str, float]] = {}
        self._tried: OrderedDict[Key, Counter[str]] = OrderedDict()
        self._known = History()

    def newest(self) -> History:
        with self._lock:
            if new := self._finished():
                for record in new:
                    self._add(record)
                self._known = History(dict(self._rows), {key: dict(spent) for key, spent in self._tried.items()})
            return self._known

    def _finished(self) -> list[Record]:
        """Since the last look, or of late; the oldest first."""
        new, begun = self._jobs.finished(), self._begun
        if not begun:
            new = self._jobs.page(TERMINAL, limit=AT_START).records
        self._begun = True
        return new

    def _add(self, record: Record) -> None:
        if took := ran_on(record.attempts):
            for name in {record.job.workload, of_folder(record.job.content_sha)} - {""}:
                key = name, record.job.task
                self._count(key, took)
                if record.job.state is State.SUCCEEDED and len(took) == 1:  # of several kinds it says nothing of either
                    self._succeeded(key, *took.items())

    def _count(self, key: Key, took: dict[str, float]) -> None:
        self._tried.setdefault(key, Counter()).update(took)
        self._tried.move_to_end(key)
        if len(self._tried) > WORKLOADS:
            self._tried.popitem(last=False)

    def _succeeded(self, key: Key, on: tuple[str, float]) -> None:
        kind, device_s = on
        of = self._took.setdefault(key, {})
        of.setdefault(kind, deque(maxlen=LAST)).append(device_s)
        self._took.move_to_end(key)
        self._rows[key] = {at: median(took) for at, took in of.items()}
        if len(self._took) > WORKLOADS:
            del self._rows[self._took.popitem(last=False)[0]]
