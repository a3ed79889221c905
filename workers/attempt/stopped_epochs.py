"""Remember attempts that were stopped before they started on a node, to refuse late starts."""

import json
import threading
from pathlib import Path
from typing import Any

from cluster.paths import write_durably
from workers.protocol.folders import read_json, replace_text

MAX_JOBS = 10_000
"""Maximum number of jobs that are remembered; those stopped longest ago are dropped first."""


class StoppedEpochs:
    """The newest stopped epoch of each job, stored in one file. Thread-safe."""

    def __init__(self, path: Path):
        self._path = path
        data: Any = read_json(path)
        entries = data.items() if isinstance(data, dict) else ()
        self._epochs = {job: epoch for job, epoch in entries if type(epoch) is int}
        self._has_unsaved = False
        self._lock = threading.Lock()

    def epochs(self) -> dict[str, int]:
        with self._lock:
            return dict(self._epochs)

    def contains(self, job: str, epoch: int) -> bool:
        with self._lock:
            return self._epochs.get(job, -1) >= epoch

    def add(self, job: str, epoch: int) -> None:
        """Record a stop in memory; `save` writes it to disk."""
        with self._lock:
            if epoch > self._epochs.pop(job, -1):
                self._has_unsaved = True
            self._epochs[job] = max(epoch, self._epochs.get(job, -1))
            while len(self._epochs) > MAX_JOBS:
                del self._epochs[next(iter(self._epochs))]

    def save(self) -> None:
        """Write new stops to disk. Raises OSError."""
        with self._lock:
            if self._has_unsaved:
                replace_text(self._path, json.dumps(self._epochs), durable=True)
                write_durably(self._path.parent)
                self._has_unsaved = False
