"""Jobs on a real fleet: what a user sees when things go well, and when their own code goes wrong. More of it is in
test_journey.py."""

import json
import sys
from pathlib import Path

import pytest

from cluster.errors import SpecError, UserError
from orchestrator import JobFailed, Orchestrator, RunJob, TrainJob

pytestmark = pytest.mark.full


def test_ranks_run_from_a_pools_python_that_ray_cannot_run_under(fleet: Orchestrator, rayless: Path, training):
    found = (
        'import importlib.util as u, sys; print(sys.executable, u.find_spec("ray"), u.find_spec("torch") is not None)'
    )
    command = fleet.submit(RunJob(command=["python", "-c", found], resources={"pool": "right"}))
    trained = fleet.submit(TrainJob(**training | {"arguments": {"steps": 3}}, resources={"pool": "right"}))
    assert str(command.wait().logs()) == f"{rayless} None True"
    assert trained.result()["returned"] == {"first": 0, "ranks": 1}
    [node] = [node for node in fleet.inventory() if node["node"] == "right-0"]
    assert {"ray", "torch"} <= node["versions"].keys() and not node["findings"]


MEET = """
import os, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(os.environ["RANK"], os.environ["GROUP_RANK"], int(total), flush=True)
dist.destroy_process_group()
"""
TORCHRUN = (
    "torchrun --nnodes $POLYFLEET_NODES --node-rank $POLYFLEET_NODE_RANK --nproc-per-node $POLYFLEET_DEVICE_COUNT"
    " --master-addr $POLYFLEET_MASTER_ADDR --master-port $POLYFLEET_MASTER_PORT meet.py"
)


@pytest.mark.parametrize(
    "how",
    [{"command": "python meet.py", "launch": "ranks"}, {"command": TORCHRUN}],
    ids=["ranks", "the guide's torchrun"],
)
def test_a_script_of_torchruns_meets_over_two_nodes_by_our_launch_and_by_its_own(
    fleet: Orchestrator, tmp_path: Path, how
):
    (tmp_path / "meet.py").write_text(MEET)
    two = {"pool": "left", "accelerators": "cpu", "nodes": 2}
    job = fleet.submit(RunJob(**how, working_dir=str(tmp_path), resources=two))
    assert job.wait().state == "SUCCEEDED", job.logs()
    assert sorted(line.text for line in job.logs() if line.stream == "stdout") == ["0 0 2", "1 1 2"]


def test_the_guide_shows_the_torchrun_that_is_tested():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "jobs.md").read_text()
    assert TORCHRUN.replace("meet.py", "train.py") in " ".join(guide.split())


def test_the_cli_says_with_its_exit_code_how_the_job_ended(fleet: Orchestrator, cli):
    assert cli("submit", "--wait", "--", "true").returncode == 0
    failed = cli("submit", "--wait", "--", "sh", "-c", "exit 3")
    assert (failed.returncode, "exit code 3" in failed.stdout + failed.stderr) == (1, True), failed


def test_a_users_exception_shows_their_own_frames_with_rank_and_node(fleet: Orchestrator, training):
    folder = Path(training["working_dir"])
    (folder / "broken.py").write_text("def train(ctx):\n    return helper(ctx)\n\ndef helper(ctx):\n    return 1 / 0\n")
    job = fleet.submit(TrainJob(entry="broken.py", working_dir=str(folder), resources={"pool": "right"}))
    with pytest.raises(JobFailed, match="ZeroDivisionError"):
        job.result()
    failure = job.view["failure"]
    assert (failure["rank"], failure["node"], failure["kind"]) == (0, "right-0", "user")
    assert "helper" in failure["traceback"] and "workers/" not in failure["traceback"]


def test_ranks_of_two_nodes_train_as_one_gang(fleet: Orchestrator, training):
    gang = {"pool": "left", "accelerators": "cpu", "nodes": 2}
    job = fleet.submit(TrainJob(**training | {"arguments": {"steps": 3}}, resources=gang))
    assert job.result()["returned"] == {"first": 0, "ranks": 2}
    assert {line.rank for line in job.logs()} <= {0, 1}


def test_a_secret_reaches_the_command_and_no_log(fleet: Orchestrator, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2-hunter2")
    job = fleet.submit(RunJob(command="echo $WORD; echo ${#WORD}", secrets={"WORD": f"file:{secret}"}))
    assert [line.text for line in job.wait().logs()] == ["***", "15"]
    assert "hunter2" not in json.dumps([job.view, job.history()])


def test_a_command_that_ends_well_because_it_is_preempted_goes_on_later(fleet: Orchestrator, until, tmp_path: Path):
    stops = (
        f"trap 'exit 0' TERM; test -e {tmp_path}/again && exit 0; touch {tmp_path}/again; while :; do sleep 0.1; done"
    )
    victim = fleet.submit(RunJob(command=stops, resources={"pool": "right"}))
    until(lambda: (tmp_path / "again").exists())
    urgent = fleet.submit(RunJob(command="true", priority=10, resources={"pool": "right"}))
    assert (urgent.wait().state, victim.wait().state) == ("SUCCEEDED", "SUCCEEDED")
    assert [attempt["outcome"] for attempt in victim.view["attempts"]] == ["preempted", "succeeded"]
    assert victim.view["interruptions"] == 1


def test_what_can_never_run_is_refused_at_once_with_what_is_here(fleet: Orchestrator, cli):
    with pytest.raises(SpecError, match=r"no pool has tpu:v5p; kinds here: cpu"):
        fleet.submit(RunJob(command="true", resources={"accelerators": "tpu:v5p:4"}))
    refused = cli("submit", "--accelerators", "tpu:v5p:4", "--", "true")
    assert (refused.returncode, "kinds here: cpu" in refused.stderr) == (2, True)


def test_a_folder_that_shadows_our_packages_is_refused_except_for_run(fleet: Orchestrator, training):
    folder = Path(training["working_dir"])
    (folder / "workers.py").write_text("print('mine')")
    with pytest.raises(UserError, match="workers"):
        fleet.submit(TrainJob(**training))
    run = fleet.submit(RunJob(command=[sys.executable, "-c", "import workers"], working_dir=str(folder)))
    assert str(run.wait().logs()) == "mine"
