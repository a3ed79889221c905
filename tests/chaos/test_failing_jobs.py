"""Jobs that hang, count wrong, use up memory or never come up, and a node whose agent dies again and again."""

import json
import os
import shlex
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from faults import HANG_S, until

from orchestrator.client import client

pytestmark = pytest.mark.full

MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 512 << 20
GROWS = "import time; kept = [bytearray(1 << 20) for _ in range(2048)]"


@pytest.mark.chaos
def test_a_training_that_hangs_is_found_and_tried_again(case, seed):
    with case("F9", "a rank sleeps amid a step; limit by default, on_events {hang: retry}", seed) as now:
        hung = now.train({"hang_at": 23}, resources={"pool": "right"}, recovery={"on_events": {"hang": "retry"}})
        until(lambda: hung.lines("step") and hung.lines("step")[-1]["step"] == 22)
        now.inject(lambda: None)
        now.goes_on(hung)
        view = now.view(hung.id)
        assert (view["interruptions"], view["resumed_step"]) == (1, 20)
        log = str(now.fleet.o.job(hung.id).logs(attempt=1))
        assert "time.sleep(3600)" in log or "trains.py" in log, log[-2000:]


@pytest.mark.chaos
def test_a_job_that_uses_up_its_nodes_memory_is_told_so_and_its_node_goes_on(case, fleet, seed):
    agent = fleet.agent("right-0")
    with limited(agent), case("F24", "a job grows past the limit of its node's control group", seed) as now:
        other = now.train(resources={"pool": "left"})
        now.works()
        now.inject(lambda: None)
        job = now.run(f"{shlex.quote(sys.executable)} -c '{GROWS}'", "FAILED", resources={"pool": "right"})
        until(lambda: now.view(job)["state"] == "FAILED")
        now.took("failed_s", time.monotonic() - now.at_s)
        failure = now.view(job)["failure"]
        assert failure["kind"] == "oom" and "limit of its control group is 512 MiB" in failure["message"], failure
        assert agent.is_running() and other.epoch == 1


@contextmanager
def limited(agent):
    """The agent and what it starts are in a control group of LIMIT_BYTES."""
    group = MEMORY / f"polyfleet-chaos-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as e:
        pytest.skip(f"no control group with a limit of memory can be made here: {e}")
    homes = {p.pid: own_group(p.pid) for p in (agent, *agent.children(recursive=True))}
    try:
        for pid in homes:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended
                (homes.get(int(pid)) or own_group(os.getpid())).write_text(pid)
        group.rmdir()


def own_group(pid):
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return MEMORY / next(line.split(":", 2)[2] for line in lines if ":memory:" in line).lstrip("/") / "cgroup.procs"


@pytest.mark.chaos
def test_a_loss_that_is_no_number_ends_the_job_and_keeps_the_last_good_checkpoint(case, seed):
    with case("F25", "the loss of a step is NaN", seed) as now:
        job = now.train({"nan_at": 13}, "FAILED", resources={"pool": "right"})
        until(lambda: now.view(job.id)["state"] == "FAILED")
        view = now.view(job.id)
        assert view["failure"]["kind"] == "nan" and "step 13" in view["failure"]["message"], view["failure"]
        assert view["checkpoint"]["step"] == 10 and len(view["attempts"]) == 1


def test_a_job_that_always_fails_stops_after_its_restarts_with_its_last_error(case, seed):
    with case("F26", "a job fails at every start, two restarts", seed) as now:
        again = {"max_restarts": 2, "backoff": "0.1s"}
        job = now.run("echo attempt $POLYFLEET_EPOCH broke >&2; exit 3", "FAILED", recovery=again)
        until(lambda: now.view(job)["state"] == "FAILED")
        view = now.view(job)
        assert (len(view["attempts"]), view["restarts"]) == (3, 2)
        assert "attempt 3 broke" in str(view["failure"]) and "max_restarts" in view["reason"]


@pytest.mark.chaos
def test_a_node_whose_agent_dies_again_and_again_takes_no_jobs_until_it_is_resumed(case, fleet, seed):
    with case("F26", "kill -9 of a node's agent every 5 s", seed) as now:
        training = now.single(recovery={"lease": "30s"})

        def state():
            return next(n["state"] for n in fleet.o.inventory() if n["node"] == "right-0")

        now.inject(lambda: None)
        while state() != "quarantined":
            assert time.monotonic() < now.at_s + HANG_S, "it is not quarantined"
            with suppress(psutil.NoSuchProcess):  # it was about to end
                fleet.agent("right-0").kill()
            time.sleep(5)
        now.took("quarantined_s", time.monotonic() - now.at_s)
        waits = now.run("true", resources={"node": "right-0"})
        reason = until(lambda: "takes no jobs" in (text := json.dumps(now.fleet.o.jobs.explain(waits))) and text)
        assert "its agent ended" in reason and "polyfleet node resume right-0" in reason
        assert len(now.view(training.id)["attempts"]) <= 3
        now.end.touch()
        with client.connect() as asked:
            asked.nodes.resume("right-0")
        until(lambda: now.view(waits)["state"] == "SUCCEEDED")
