"""Child: jobs and inventory of one checkout's fleet, whose packages come first on the path; `versions.py` asks."""

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from parts.helper import answer
from parts.jobs import Jobs
from parts.samples import Samples

from orchestrator import Orchestrator
from orchestrator.client import client as server

CASES = ("acknowledged", "running", "done", "stage.accepted", "stage.placed", "stage.command_ran", "stage.finished")
samples = Samples()
jobs = Jobs(samples)
orchestrator = Orchestrator.connect()
client = server.connect()


def job() -> dict[str, float]:
    """Seconds of one no-op job: submit to acknowledged, to its command running, to done; and of its stages."""
    jobs.one("job")
    return {name: samples.row(f"job.{name}")["samples_s"][-1] for name in CASES}


def inventory() -> dict[str, float]:
    return {"rest": timed(client.nodes.list), "python": timed(orchestrator.inventory)}


def timed(call: Any) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


answer({"job": job, "inventory": inventory}, sys.stdin)
