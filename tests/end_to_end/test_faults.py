"""Things are really killed or damaged; the job goes on, once, from its newest checkpoint. More of it is in
test_journey.py."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster.fleet import fleet_record
from orchestrator import Orchestrator, RunJob, TrainJob
from orchestrator.client import client

pytestmark = pytest.mark.full


def holding(training: dict[str, Any]) -> Path:
    """The training stops at step 12, after two checkpoints, until that file is there."""
    go_on = Path(training["working_dir"]) / "go-on"
    training["arguments"] |= {"hold_at": 12, "go_on": str(go_on)}
    return go_on


def test_a_killed_node_costs_its_job_nothing_but_time_and_comes_back_by_itself(
    fleet: Orchestrator, training, until, raylet_of
):
    training["recovery"] = {"lease": "5s"}
    go_on = holding(training)
    job = fleet.submit(TrainJob(**training, resources={"ordered": [{"pool": "right"}, {"pool": "left"}]}))
    until(lambda: job.view["checkpoint"])
    raylet_of("right-0").kill()
    go_on.touch()
    returned = job.result()["returned"]
    view = job.view
    if [a["pool"] for a in view["attempts"]] == ["right"]:  # its node was there again before its lease had passed
        assert (returned["first"], view["interruptions"]) == (0, 0)
    else:
        assert [a["pool"] for a in view["attempts"]] == ["right", "left"]
        assert returned["first"] == view["resumed_step"] >= 5
    until(lambda: {n["state"] for n in fleet.inventory()} == {"ready"})
    assert ("right-0", "repair") in {(f["node"], f["subject"]) for f in fleet.fleet.doctor()}
    assert fleet.submit(RunJob(command="true", resources={"pool": "right"})).wait().state == "SUCCEEDED"


def test_while_the_head_does_not_answer_the_server_does_and_says_what_it_waits_for(
    fleet: Orchestrator, until, state_server, cli
):
    running = fleet.submit(RunJob(command="sleep 8", resources={"pool": "right"}))
    until(lambda: running.state == "RUNNING")
    state_server().suspend()
    try:
        until(lambda: any("list its nodes for" in f["message"] for f in fleet.fleet.doctor()))
        waiting = fleet.submit(RunJob(command="true", resources={"pool": "left"}))
        until(lambda: "has not answered" in waiting.view["reason"])
        with client.connect() as asked:
            for ask in (asked.jobs.list, asked.fleet.show, asked.fleet.doctor, asked.server.health):
                ask()  # each answers while the head is still suspended
            until(lambda: asked.server.health()["controller"]["turn_age_s"] < 1.0)
        assert "head: Ray's head has not answered for" in cli("status").stdout
        until(lambda: running.state == "SUCCEEDED")
    finally:
        state_server().resume()
    assert waiting.wait().state == "SUCCEEDED" and waiting.view["interruptions"] == 0, waiting.view["attempts"]
    until(lambda: not [f for f in fleet.fleet.doctor() if f["subject"] in ("head", "ray")])


def test_a_hung_agent_is_started_again_and_finds_its_attempt(fleet: Orchestrator, until, agent_of):
    """Within the lease of its attempt, however long a new agent takes to start here."""
    job = fleet.submit(RunJob(command="sleep 18", resources={"pool": "right"}, recovery={"lease": "150s"}))
    until(lambda: job.state == "RUNNING")
    agent_of("right-0").suspend()
    assert job.wait().state == "SUCCEEDED" and job.view["attempt"] == 1
    assert any("agent of right-0 did not answer" in f["message"] for f in fleet.fleet.doctor())


def test_attempts_of_a_database_that_was_emptied_are_not_stopped_unasked(
    fleet: Orchestrator, home: Path, until, cli, processes_of
):
    job = fleet.submit(RunJob(command="sleep 1000", resources={"pool": "right"}))
    until(lambda: job.state == "RUNNING")
    assert cli("server", "stop").returncode == 0
    kept = home / "kept"
    kept.mkdir()
    for file in home.glob("polyfleet.db*"):
        file.rename(kept / file.name)
    with Orchestrator.connect() as emptied:
        told = until(lambda: [f for f in emptied.fleet.doctor() if f["subject"] == "store" and f["level"] == "error"])
        assert "was replaced or emptied: 1 attempt of a job that it does not contain is running" in told[0]["message"]
        assert f"{job.id}.1.0 on right-0" in told[0]["message"]
        assert emptied.submit(RunJob(command="true", resources={"pool": "left"})).wait().state == "SUCCEEDED"
        waits = emptied.submit(RunJob(command="true", resources={"pool": "right"}))
        until(lambda: "unknown to this server's database" in waits.view["reason"])
    assert processes_of(job.id)
    assert cli("server", "stop").returncode == 0
    for file in kept.iterdir():
        file.replace(home / file.name)
    with Orchestrator.connect() as restored:
        assert restored.job(job.id).state == "RUNNING"
        assert not [f for f in restored.fleet.doctor() if f["level"] == "error"]


def test_two_at_once_bring_up_one_fleet(fleet: Orchestrator, fleet_file: Path, cli):
    before = fleet_record.read()
    with ThreadPoolExecutor(2) as together:
        said = list(together.map(lambda _: cli("up", "--file", str(fleet_file)), range(2)))
    assert [s.returncode for s in said] == [0, 0], [s.stderr for s in said]
    assert fleet_record.read() == before


@pytest.mark.parametrize("resumes_in", ["right", "left"])
def test_a_rotten_newest_checkpoint_is_passed_over(
    fleet: Orchestrator, training, home: Path, until, processes_of, cli, resumes_in: str
):
    """Where the job ran, found by its ranks as they load it; in another pool, as it is copied there."""
    wanted = {"ordered": [{"pool": "right"}, {"pool": resumes_in}]}
    go_on = holding(training)
    job = fleet.submit(TrainJob(**training, resources=wanted, checkpoint={"keep": 100}))
    until(lambda: len(list((home / "storage" / "right" / job.id).glob("step-*/MANIFEST.json"))) >= 2)
    [rank] = [p for p in processes_of(job.id) if "workers.tasks.rank_main" in p.cmdline()]
    rank.suspend()
    *_, before, newest = sorted((home / "storage" / "right" / job.id).glob("step-*"))
    shard = next(newest.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    rank.kill()
    go_on.touch()
    assert job.result()["returned"]["first"] == int(before.name.split("-")[1])
    assert job.view["attempts"][-1]["pool"] == resumes_in
    shown = json.loads(cli("checkpoint", "show", f"right:{job.id}/{newest.name}", "-o", "json").stdout)
    assert f"right:{job.id}/{newest.name}/{shard.name}: chunk 1 of 1 is not what was saved" in shown["damaged"]
    assert f"checkpoint right:{job.id}/{newest.name}" in cli("doctor").stdout
    said = f"{newest.name} is damaged, so the job does not resume from it"
    assert (said in cli("logs", job.id).stdout) == (resumes_in == "right")
    shutil.rmtree(newest)
    assert newest.name not in cli("doctor").stdout, "deleted, as `doctor` said"
