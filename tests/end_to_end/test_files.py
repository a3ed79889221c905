"""Files of jobs on a real fleet: of a gang, and after the server was killed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator import JobHandle, Orchestrator, RunJob
from orchestrator.client import client as http
from orchestrator.client import file_download

pytestmark = pytest.mark.full

WRITES = """
echo $POLYFLEET_EPOCH >> $POLYFLEET_OUTPUT_DIR/of-$HOSTNAME-$$
head -c 30000000 /dev/urandom > $POLYFLEET_OUTPUT_DIR/large-$$
"""


def test_nodes_of_a_gang_share_the_folder_where_they_share_the_storage(fleet: Orchestrator):
    gang = {"pool": "left", "accelerators": "cpu", "nodes": 2}
    job = fleet.submit(RunJob(command=WRITES, resources=gang))
    assert job.wait().state == "SUCCEEDED"
    told = job.files()
    assert [folder["prefix"] for folder in told["folders"]] == [""]
    assert sorted(entry["bytes"] for entry in told["entries"])[2:] == [30_000_000] * 2


def test_a_download_outlives_a_server_that_is_killed_meanwhile(fleet: Orchestrator, home: Path, tmp_path: Path, until):
    job = fleet.submit(RunJob(command=WRITES, resources={"pool": "right"}))
    assert job.wait().state == "SUCCEEDED"
    killed: list[psutil.Process] = []

    def kill(done: int, total: int) -> None:
        if killed:
            return
        killed.append(psutil.Process(json.loads((home / "server.json").read_text())["pid"]))
        killed[0].kill()
        until(lambda: not killed[0].is_running() or killed[0].status() == psutil.STATUS_ZOMBIE)
        http.connect(home).close()  # it starts the next one

    with http.connect(home) as client:
        got = file_download.get(client, job.id, "", str(tmp_path / "here"), progress=kill)
    assert killed and len(got.files) == 2
    there = {entry["path"]: entry["bytes"] for entry in job.files()["entries"]}
    assert there == {path.name: path.stat().st_size for path in (tmp_path / "here").iterdir()}


def test_data_is_sent_cached_and_of_equal_pools_the_one_that_has_it_is_taken(
    fleet: Orchestrator, tmp_path: Path, until: Callable[..., None]
):
    (tmp_path / "words").mkdir()
    (tmp_path / "words/a").write_text("hello")
    data = [{"uri": str(tmp_path / "words"), "mount": "in/data/"}]

    def ran(**resources: Any) -> JobHandle:
        job = fleet.submit(RunJob(command="cat in/data/a", data=data, resources=resources))
        assert job.wait().state == "SUCCEEDED" and [line.text for line in job.logs()] == ["hello"]
        return job

    ran(pool="right")
    until(lambda: [node["node"] for node in fleet.inventory() if node.get("data")] == ["right-0"])
    job = ran(any_of=[{"pool": "left"}, {"pool": "right"}])
    [attempt] = job.view["attempts"]
    assert attempt["pool"] == "right"
