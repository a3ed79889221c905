"""What is said of a node that is silent but not lost, and of what runs and lies there. It is silent for seconds."""

import json
import shutil
from pathlib import Path

import pytest

from cluster.errors import FleetError
from orchestrator import Orchestrator
from orchestrator.client import client as http

pytestmark = pytest.mark.full
CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoint-v1"
ON_CPU = {"resources": {"pool": "cpu"}}
SILENT = "node cpu-0 has not answered for "


def test_nothing_false_is_said_while_a_node_is_silent(here, live, talking, wait_for):
    def view(job):
        return json.loads(here("show", job, "-o", "json").stdout)

    with http.connect(start=False) as client:
        waits = {"recovery": {"on_disconnect": "wait"}}
        job = client.jobs.submit(talking.spec | ON_CPU | waits)["id"]
        talking.say("before\n")
        wait_for(lambda: "before" in here("logs", job).stdout)
        wait_for(lambda: view(job)["state"] == "RUNNING")  # a line can be read before its node has reported the state
        shutil.copytree(CHECKPOINTS, live.home / "storage" / "cpu" / "saved")
        assert (view(job)["state"], view(job)["known_until"]) == ("RUNNING", None)
        with live.fleet.silent(live.service, "cpu-0"):
            seen = view(job)
            assert (seen["state"], SILENT in seen["reason"]) == ("RUNNING", True)
            assert SILENT in here("jobs").stdout and "the job waits for it" in here("jobs").stdout
            wait_for(lambda: view(job)["reason"] != seen["reason"])  # it is silent for a second longer
            ran = abs(_s(view(job)["known_until"]) - _s(seen["known_until"]))
            assert ran < 0.5, "its time does not count on"
            for words in (["logs", job], ["logs", job, "--tail", "3"], ["logs", job, "--rank", "0"]):
                done = here(*words)
                assert (done.returncode, done.stdout) == (3, "")
                assert "on node cpu-0, which has not answered for" in done.stderr and "nothing" not in done.stderr
            with Orchestrator.connect(start=False) as o, pytest.raises(FleetError, match="has not answered for"):
                o.job(job).logs()
            later = client.jobs.submit({"task": "run", "command": "true", "name": "later"} | ON_CPU)["id"]
            wait_for(lambda: SILENT in view(later)["reason"])
            said = here("explain", job).stdout
            assert SILENT in said and "waits for 1 device" not in view(later)["reason"]
            assert "silent: no reply for " in here("inventory").stdout
            for words in (["list"], ["list", "cpu"], ["list", "--pool", "cpu"]):
                listed = here("checkpoint", *words)
                assert (listed.returncode, listed.stdout) == (3, "")
                assert "cpu-0, which has not answered" in listed.stderr
            shutil.copytree(CHECKPOINTS, live.home / "storage" / "xla" / "elsewhere")
            listed = here("checkpoint", "list")
            assert (listed.returncode, "xla:elsewhere" in listed.stdout) == (0, True), "one node hides no other's"
            assert "pool cpu on node cpu-0, which has not answered" in listed.stderr
        wait_for(lambda: view(job)["known_until"] is None)
        assert "before" in here("logs", job).stdout


def _s(iso):
    from orchestrator.units import timestamp

    return timestamp(iso).timestamp()
