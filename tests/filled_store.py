"""Stores with jobs in them, and programs that back one up and put it back."""

from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.store.events.idempotency import StoredResponse
from orchestrator.store.events.unit_of_work import make_metrics_row

RESTORE = "import sys; from pathlib import Path; from orchestrator.store.database.restore import restore;"
RESTORE += "restore(sys.argv[1], Path(sys.argv[2]))"
BACKUP = "import sys; from pathlib import Path; from orchestrator.store.database.backup import backup;"
BACKUP += "backup(sys.argv[1], Path(sys.argv[2]))"


def fill(store, first=0, count=5):
    for number in range(first, first + count):
        submit(store, f"job-{number}")
        store.metrics.queue(make_metrics_row(f"job-{number}", 1, number, 1.0, {"loss": 0.5}))
        store.benchmarks.append("run", {"line": "result", "number": number, "text": "é 🙂 \0"})


def submit(store, key):
    job = Job(key, "j", "run", (Candidate(("cpu",)),))
    events = [submitted(job, {"command": "true"}, 1.0), Event(key, "cancelled", 0, 1.0)]
    return store.idempotent(key, "digest", lambda: StoredResponse({"id": key}, events))


def content(store):
    reports = [store.metrics.read(f"job-{n}") for n in range(10)]
    return store.identity, store.read(0), reports, store.benchmarks.read("run")
