"""Things are really killed; the job goes on, once, from its newest checkpoint."""

import json
from pathlib import Path

import psutil

from cluster import fleet_record
from orchestrator import Orchestrator, RunJob, TrainJob


def test_a_killed_rank_recovers_on_the_next_candidate_from_the_newest_checkpoint(
    fleet: Orchestrator, training, until, processes_of
):
    job = fleet.submit(TrainJob(**training, resources={"ordered": [{"pool": "right"}, {"pool": "left"}]}))
    until(lambda: job.view["checkpoint"])
    [rank] = [p for p in processes_of(job.id) if "workers.attempt.child" in p.cmdline()]
    rank.kill()
    returned = job.result(60)["returned"]
    view = job.view
    assert [a["pool"] for a in view["attempts"]] == ["right", "left"]
    assert returned["first"] == view["resumed_step"] >= 5
    assert view["interruptions"] == 1 and view["restarts"] == 0


def test_a_killed_server_comes_back_and_adopts_what_runs(fleet: Orchestrator, training, home: Path, until):
    job = fleet.submit(TrainJob(**training))
    until(lambda: job.state == "RUNNING")
    server = psutil.Process(json.loads((home / "server.json").read_text())["pid"])
    server.kill()
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    with Orchestrator.connect() as again:
        adopted = again.job(job.id)
        assert adopted.result(60)["returned"]["first"] == 0
        assert adopted.view["epoch"] == 1
        steps = [r["step"] for r in adopted.reports()]
        assert steps == sorted(set(steps)) and steps[-1] == 40


def test_a_killed_node_costs_its_job_nothing_but_time(
    fleet: Orchestrator, training, fleet_file: Path, until, raylet_of
):
    training["recovery"] = {"lease": "4s"}
    job = fleet.submit(TrainJob(**training, resources={"ordered": [{"pool": "right"}, {"pool": "left"}]}))
    until(lambda: job.view["checkpoint"])
    raylet_of("right-0").kill()
    returned = job.result(60)["returned"]
    view = job.view
    assert [a["pool"] for a in view["attempts"]] == ["right", "left"]
    assert returned["first"] == view["resumed_step"] >= 5
    with Orchestrator.up(fleet_file) as repaired:
        assert {n["state"] for n in repaired.inventory()} == {"ready"}


def test_two_at_once_bring_up_one_fleet(fleet: Orchestrator, fleet_file: Path, cli):
    before = fleet_record.read()
    said = [cli("up", "-f", str(fleet_file)) for _ in range(2)]
    assert [s.returncode for s in said] == [0, 0]
    assert fleet_record.read() == before


def test_a_rotten_newest_checkpoint_is_passed_over(fleet: Orchestrator, training, home: Path, until, processes_of):
    job = fleet.submit(TrainJob(**training, resources={"pool": "right"}))
    until(lambda: len(list((home / "storage" / "right" / job.id).glob("step-*/MANIFEST.json"))) >= 2)
    [rank] = [p for p in processes_of(job.id) if "workers.attempt.child" in p.cmdline()]
    rank.suspend()
    *_, before, newest = sorted((home / "storage" / "right" / job.id).glob("step-*"))
    shard = next(newest.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    rank.kill()
    assert job.result(60)["returned"]["first"] == int(before.name.split("-")[1])


def test_down_leaves_no_process_of_ours(fleet: Orchestrator, home: Path, until, cli, processes_of):
    """Last in this file: the next test that wants a fleet brings it up again."""
    job = fleet.submit(RunJob(command="sleep 300"))
    until(lambda: job.state == "RUNNING")
    assert cli("down").returncode == 0
    assert fleet_record.read() is None

    def left() -> list[str]:
        return [
            " ".join(p.info["cmdline"]) for p in psutil.process_iter(["cmdline"]) if str(home) in str(p.info["cmdline"])
        ]

    until(lambda: not left() and not processes_of(job.id))
