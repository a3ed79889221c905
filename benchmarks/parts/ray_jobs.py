"""Child, in an environment with ray[default]: one job through the job SDK, from submission until it has succeeded."""

import shlex
import sys
import time
from time import perf_counter

from helper import answer
from ray.job_submission import JobStatus, JobSubmissionClient

LOOK_EVERY_S = 0.01
PATIENCE_S = 120.0

client = JobSubmissionClient(sys.argv[1])
entrypoint = shlex.join(sys.argv[2:])


def submit_and_wait() -> dict[str, float]:
    """{"acknowledged", "done"} in seconds; the answer is looked for a hundred times a second."""
    start = perf_counter()
    job = client.submit_job(entrypoint=entrypoint)
    acknowledged = perf_counter() - start
    while (status := client.get_job_status(job)) != JobStatus.SUCCEEDED:
        if status.is_terminal() or perf_counter() - start > PATIENCE_S:
            raise SystemExit(f"{job}: {status}")
        time.sleep(LOOK_EVERY_S)
    return {"acknowledged": acknowledged, "done": perf_counter() - start}


answer({"submit_and_wait": submit_and_wait}, sys.stdin)
