"""Jobs of a home: put there as an earlier server has accepted them, and as the command line lists them."""

import json

from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Job
from orchestrator.store.events.event_store import EventStore


def put_job(url, name):
    """As an earlier server has accepted it."""
    store = EventStore(url)
    job = Job(name, name, "run", (Candidate(("cpu",)),))
    store.append([submitted(job, {"task": "run", "command": "true", "pool": "cpu"}, 1.0)])
    store.close()


def jobs(polyfleet):
    done = polyfleet("jobs", "-o", "json")
    assert done.returncode == 0, done.stderr
    return {job["id"]: job["state"] for job in json.loads(done.stdout)}
