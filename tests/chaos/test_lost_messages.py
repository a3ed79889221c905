"""Requests and answers between Ray's processes are lost: what we ask for is done all the same, and once."""

import json

import pytest
from faults import Fleet, case, until

from cluster import ray_node

pytestmark = pytest.mark.chaos
LOST = {"*": {"num_failures": -1, "req_failure_prob": 3, "resp_failure_prob": 3}}
"""Of every hundred calls, three never arrive, and of three the answer is lost. -1: no end to it."""


def test_a_fleet_that_loses_messages_does_all_of_its_jobs_once(tmp_path, seed, monkeypatch):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("POLYFLEET_HOME", str(home))
    monkeypatch.setitem(ray_node.SETTINGS, "RAY_testing_rpc_failure", json.dumps(LOST))
    fleet = Fleet(home)
    try:
        with case(fleet, tmp_path, "F13", "3 % of Ray's calls and 3 % of its answers are lost", seed) as now:
            marks = now.folder / "marks"
            now.gang()
            now.inject(lambda: None)
            jobs = [now.run(f"echo {n} >> {marks}", resources={"pool": "left"}) for n in range(10)]
            now.end.touch()
            for job in jobs:
                until(lambda job=job: now.view(job)["state"] == "SUCCEEDED")
            assert sorted(marks.read_text().split(), key=int) == [str(n) for n in range(10)]
    finally:
        fleet.down()
