"""The head goes away, in three ways; jobs that run go on, and new ones wait and say so."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster.fleet import fleet_record
from cluster.host.processes import with_descendants
from cluster.nodes.ray_head import storage
from orchestrator import Orchestrator, RunJob

pytestmark = pytest.mark.full

COUNTS = "i=0; while [ ! -e {end} ]; do i=$((i + 1)); echo $i; sleep 0.2; done"


LISTED = """
import json
from cluster.fleet import fleet_record
from cluster.nodes import connect
record = fleet_record.read()
connect.prepare(record)
connect.connect(record)
from orchestrator.runtime.agents import actors
print(json.dumps({row.name: row.drain_left_s for row in actors.nodes() if row.alive}))
"""


def drained() -> dict[str, float]:
    """By node, the seconds that Ray gives those which are drained."""
    said = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True).stdout
    return {node: left for node, left in json.loads(said).items() if left is not None}


def starts_of(node: str) -> list[int]:
    """Every `ray start` of that name in this fleet."""
    record = fleet_record.read()
    assert record is not None
    found = psutil.process_iter(["pid", "cmdline"])
    words = {p.info["pid"]: " ".join(p.info["cmdline"] or ()) for p in found}
    return [pid for pid, text in words.items() if f"polyfleet.io/node={node}" in text and record.address in text]


def head_processes() -> list[psutil.Process]:
    record = fleet_record.read()
    assert record is not None and record.head is not None
    return with_descendants([record.head.process])


@pytest.fixture
def counting(fleet: Orchestrator, tmp_path: Path, until) -> Callable[..., tuple[object, Path]]:
    """A job that counts until a file is there, and that file."""

    def submit(on: Orchestrator = fleet, **recovery: str) -> tuple[object, Path]:
        end = tmp_path / "end"
        command = COUNTS.format(end=end)
        job = on.submit(RunJob(command=command, resources={"pool": "right"}, recovery=recovery))
        until(lambda: job.state == "RUNNING")
        return job, end

    return submit


def counted(job: object) -> int:
    return len(str(job.logs()).splitlines())


def ends_as_if_nothing_had_been(job: object, end: Path) -> None:
    end.touch()
    assert job.wait().state == "SUCCEEDED"
    assert (job.view["attempt"], job.view["interruptions"]) == (1, 0)
    numbers = str(job.logs()).split()
    assert numbers == [str(i) for i in range(1, len(numbers) + 1)]


def test_a_killed_head_comes_back_to_its_cluster_and_no_job_notices(
    fleet: Orchestrator, home: Path, counting, until, state_server, agent_of
):
    job, end = counting()
    address, agent = fleet.fleet.show()["address"], agent_of("right-0").pid
    server = json.loads((home / "server.json").read_text())["pid"]
    state_server().kill()
    until(lambda: ("head", "repair") in {(f["node"], f["subject"]) for f in fleet.fleet.doctor()})
    until(lambda: {n["state"] for n in fleet.inventory()} == {"ready"} and fleet.fleet.show()["state"] == "up")
    assert fleet.submit(RunJob(command="true", resources={"pool": "left"})).wait().state == "SUCCEEDED"
    assert (fleet.fleet.show()["address"], agent_of("right-0").pid) == (address, agent)
    assert json.loads((home / "server.json").read_text())["pid"] == server
    ends_as_if_nothing_had_been(job, end)


def test_without_a_head_jobs_run_longer_than_their_lease_and_new_ones_wait(
    unrepaired: Orchestrator, fleet_file: Path, counting, until, cli
):
    job, end = counting(unrepaired, lease="5s")
    for process in head_processes():
        process.kill()
    waiting = unrepaired.submit(RunJob(command="true", resources={"pool": "left"}))
    until(lambda: waiting.view["reason"] == "the fleet's head is gone")
    before = counted(job)
    until(lambda: counted(job) >= before + 40)  # 8 s at least
    assert job.state == "RUNNING"
    assert waiting.state in ("PENDING", "RECOVERING"), "the latter where it was placed before the end was noticed"
    assert "the fleet's head is gone: running jobs continue, no job is started" in cli("status").stdout
    assert cli("up", "--file", str(fleet_file)).returncode == 0
    assert waiting.wait().state == "SUCCEEDED"
    ends_as_if_nothing_had_been(job, end)


def test_a_head_lost_with_its_storage_is_replaced_and_nodes_adopt_what_runs(
    fleet: Orchestrator, counting, until, agent_of
):
    job, end = counting(lease="60s", on_disconnect="wait")
    record, agent = fleet_record.read(), agent_of("right-0").pid
    assert record is not None
    shutil.rmtree(storage(record))
    for process in head_processes():
        process.kill()
    until(lambda: fleet.fleet.show()["address"] != record.address and not Path(record.temp_dir).exists())
    until(lambda: fleet.fleet.show()["state"] == "up" and {n["state"] for n in fleet.inventory()} == {"ready"})
    until(lambda: not psutil.pid_exists(agent) and not Path(record.token_path).exists())
    assert fleet.submit(RunJob(command="true", resources={"pool": "left"})).wait().state == "SUCCEEDED"
    ends_as_if_nothing_had_been(job, end)


def test_a_killed_raylet_is_replaced_once_whoever_does_it_and_its_job_goes_on(
    fleet: Orchestrator, fleet_file: Path, counting, until, raylet_of, cli
):
    """By the server or by `up`, which wait for each other."""
    job, end = counting(lease="60s", on_disconnect="wait")
    before = starts_of("right-0")
    raylet_of("right-0").kill()
    assert cli("up", "--file", str(fleet_file)).returncode == 0
    until(lambda: (now := starts_of("right-0")) and now != before)
    until(lambda: {n["state"] for n in fleet.inventory()} == {"ready"})
    assert len(starts_of("right-0")) == 1
    ends_as_if_nothing_had_been(job, end)


def test_a_node_that_is_told_to_end_lets_its_attempt_save_first(fleet: Orchestrator, home: Path, until, cli):
    job = fleet.submit(RunJob(command="trap '' TERM; sleep 60", resources={"pool": "right"}))
    until(lambda: job.state == "RUNNING")
    start = next(p for p in fleet_record.read().processes if p.node == "right-0")
    os.kill(start.pid, signal.SIGTERM)
    notice = home / "nodes" / "right-0" / "notice"
    said = json.loads(until(lambda: notice.exists() and notice.read_text()))
    assert said == {"reason": "the node received SIGTERM", "grace_s": 30.0}
    [(node, left_s)] = until(drained).items()
    assert node == "right-0" and 0.0 < left_s <= 30.0 and psutil.pid_exists(start.pid)
    job.cancel()
    until(lambda: next(p for p in fleet_record.read().processes if p.node == "right-0") != start)
    until(lambda: {n["state"] for n in fleet.inventory()} == {"ready"})
    assert not notice.exists()


def test_a_node_that_was_started_and_not_written_down_is_one_node_after_the_next_up(
    fleet: Orchestrator, fleet_file: Path, until, cli, raylet_of
):
    """As after a `polyfleet up` that was killed between the two."""
    first = raylet_of("left-1")
    record = fleet_record.read()
    assert record is not None
    assert cli("server", "stop").returncode == 0
    kept = tuple(p for p in record.processes if p.node != "left-1")
    fleet_record.write(replace(record, processes=kept))
    assert cli("up", "--file", str(fleet_file)).returncode == 0
    assert not first.is_running() or first.status() == psutil.STATUS_ZOMBIE
    assert raylet_of("left-1").is_running()
