"""Requests and answers between Ray's processes are lost: what we ask for is done all the same, and once."""

import json
from pathlib import Path

import pytest
from faults import case, until

from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.nodes import ray_node

pytestmark = pytest.mark.chaos
LOST = {"*": {"num_failures": -1, "req_failure_prob": 3, "resp_failure_prob": 3}}
"""Of every hundred calls, three never arrive, and of three the answer is lost. -1: no end to it."""

INJECTED = "Inject RPC"
"""So begins what Ray writes of each."""

UPS = 3


def injected():
    """How many there have been by now, as Ray's own logs tell."""
    logs = Path(fleet_record.read().ray_dir) / "session_latest" / "logs"
    return sum(file.read_text(errors="replace").count(INJECTED) for file in logs.iterdir() if file.is_file())


def started(own_fleet):
    """Nodes greet the head in vain as well: one that is not up in time is named, and the next `up` starts all anew."""
    for _ in range(UPS - 1):
        try:
            return own_fleet()
        except FleetError as e:
            assert "is not up after" in e.message or "did not start" in e.message, e
    return own_fleet()


def test_a_fleet_that_loses_messages_does_all_of_its_jobs_once(tmp_path, seed, own_fleet, monkeypatch):
    monkeypatch.setitem(ray_node.SETTINGS, "RAY_testing_rpc_failure", json.dumps(LOST))
    fleet = started(own_fleet)
    with case(fleet, tmp_path, "F13", "3 % of Ray's calls and 3 % of its answers are lost", seed) as now:
        marks = now.folder / "marks"
        now.gang()
        before = injected()
        now.inject(lambda: None)
        jobs = [now.run(f"echo {n} >> {marks}", resources={"pool": "left"}) for n in range(60)]
        now.end.touch()
        for job in jobs:
            until(lambda job=job: now.view(job)["state"] == "SUCCEEDED")
        now.record["injected"] = injected() - before
        assert now.record["injected"]
        assert sorted(map(int, marks.read_text().split())) == list(range(60))
