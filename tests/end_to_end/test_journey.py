"""One journey over one real fleet of two environments, as its user makes it: up, look, submit, preempt, kill, resume
elsewhere, copy, compare, down. The tests share the fleet and leave it as it was; the last one takes it down.

Nothing has to happen within some seconds: a training waits at a step until its test lets it go on.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fleet_processes
import pytest
from patience import PATIENCE, wait_for

from cluster.environments import environments
from cluster.errors import NotFound
from cluster.fleet import fleet_record
from orchestrator import JobHandle, Orchestrator, RunJob, TrainJob

pytestmark = pytest.mark.timeout(400)
ORDERED = True
LIMIT_S = 300.0 * PATIENCE
Cli = Callable[..., subprocess.CompletedProcess[str]]

FLEET = """
name: journey
pools:
  cpu: {{backend: cpu, env: {{WHICH: first}}}}
  other: {other}
"""
EMULATED = "{backend: tpu, environment: xla, env: {PJRT_DEVICE: CPU, WHICH: second}}"
WITHOUT_XLA = "{backend: cpu, env: {WHICH: second}, environment: {interpreter: %s}}"

STEPS, SAVE_EVERY, HOLD_AT = 12, 5, 7
TRAIN = """
import os, time, torch

def train(ctx):
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = ctx.prepare(model, optimizer)
    restored = ctx.checkpoint.restore({"model": model, "optimizer": optimizer})
    first = restored.step if restored else 0
    given = ctx.arguments
    for step in range(first + 1, given["steps"] + 1):
        inputs = torch.linspace(-1, 1, 32).reshape(4, 8) * step
        loss = model(inputs.to(ctx.device)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        ctx.report(step=step, of=given["steps"], loss=loss)
        if step % given["save_every"] == 0:
            ctx.checkpoint.save(step, {"model": model, "optimizer": optimizer})
        while step == given.get("hold_at") and not os.path.exists(given["go_on"]) and not ctx.preempted:
            time.sleep(0.02)
        if ctx.preempted:
            ctx.checkpoint.save(step, {"model": model, "optimizer": optimizer})
            return {"stopped_at": step}
    return {"first": first}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("journey")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYFLEET_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def emulated() -> bool:
    """Whether the second environment is here: its XLA runs on the CPU."""
    try:
        environments.path("xla")
    except NotFound:
        return False
    return True


@pytest.fixture(scope="module")
def shared_fleet(home: Path, emulated: bool, rayless: Path) -> Iterator[Orchestrator]:
    other = EMULATED if emulated else WITHOUT_XLA % rayless
    (home / "fleet.yaml").write_text(FLEET.format(other=other))
    with Orchestrator.up(home / "fleet.yaml") as up:
        yield up
    if fleet_record.read() is not None:
        with Orchestrator.connect() as last:
            last.down()


@pytest.fixture
def fleet(shared_fleet: Orchestrator) -> Iterator[Orchestrator]:
    """Asked anew: the test before may have killed its server."""
    with Orchestrator.connect() as o:
        yield o
    if fleet_record.read() is not None:
        with Orchestrator.connect() as o:
            for job in o.jobs.list(["PENDING", "STARTING", "RUNNING", "SAVING", "RECOVERING"]):
                o.jobs.cancel(job["id"])


class Training:
    """Jobs of one training, which wait at a step where they are told to."""

    def __init__(self, fleet: Orchestrator, folder: Path):
        self._fleet, self._go_on = fleet, folder / "go-on"
        (folder / "train.py").write_text(TRAIN)
        self._folder = folder

    def submit(self, hold_at: int = 0, **more: Any) -> JobHandle:
        arguments = {"steps": STEPS, "save_every": SAVE_EVERY, "hold_at": hold_at, "go_on": str(self._go_on)}
        job = TrainJob(entry="train.py", working_dir=str(self._folder), arguments=arguments, **more)
        return self._fleet.submit(job)

    def holds(self, hold_at: int = HOLD_AT, **more: Any) -> JobHandle:
        """One that has come to that step."""
        job = self.submit(hold_at, **more)
        wait_for(lambda: losses(job).get(hold_at), job.logs, LIMIT_S)
        return job

    def go_on(self) -> None:
        self._go_on.touch()


def losses(job: JobHandle) -> dict[int, float]:
    return {r["step"]: r["metrics"]["loss"] for r in job.reports() if "loss" in r["metrics"]}


@pytest.fixture
def training(fleet: Orchestrator, tmp_path: Path) -> Training:
    return Training(fleet, tmp_path)


@pytest.fixture(scope="module")
def reference(shared_fleet: Orchestrator, home: Path, tmp_path_factory: pytest.TempPathFactory) -> JobHandle:
    """The training, never interrupted, in pool cpu. Its server is killed at HOLD_AT; the next one adopts it."""
    training = Training(shared_fleet, tmp_path_factory.mktemp("reference"))
    job = training.holds(resources={"pool": "cpu"})
    server = fleet_processes.server(home)
    server.kill()
    wait_for(lambda: fleet_processes.ended(server))
    with Orchestrator.connect() as again:
        training.go_on()
        assert again.job(job.id).result(LIMIT_S)["returned"] == {"first": 0}
    return job


def test_the_fleet_has_the_devices_of_both_environments(fleet: Orchestrator, emulated: bool, cli: Cli):
    nodes = {node["pool"]: node for node in fleet.inventory()}
    assert [(nodes[pool]["state"], len(nodes[pool]["devices"])) for pool in ("cpu", "other")] == [("ready", 1)] * 2
    kinds = [nodes[pool]["devices"][0]["kind"] for pool in ("cpu", "other")]
    assert kinds == ["cpu", "tpu:emulated" if emulated else "cpu"]
    if emulated:
        assert nodes["cpu"]["versions"]["torch"] != nodes["other"]["versions"]["torch"]
    told = json.loads(cli("status", "-o", "json").stdout)
    assert (told["fleet"]["name"], told["fleet"]["state"]) == ("journey", "up")


def test_a_command_runs_in_the_pool_it_names_and_its_exit_code_comes_back(fleet: Orchestrator, cli: Cli):
    done = cli("submit", "--wait", "--pool", "other", "--", "sh", "-c", "echo it is $WHICH; exit 3")
    assert done.returncode == 1 and "exit code 3" in done.stdout + done.stderr, done
    [job] = [job for job in fleet.jobs.list() if job["state"] == "FAILED"]
    assert "it is second" in cli("logs", job["id"]).stdout
    assert cli("submit", "--wait", "--", "true").returncode == 0


def test_no_token_and_no_variable_of_ray_reaches_a_command(fleet: Orchestrator, home: Path):
    job = fleet.submit(RunJob(command="env; cat /proc/$PPID/environ | tr '\\0' '\\n'"))
    said = str(job.wait(LIMIT_S).logs())
    assert "POLYFLEET_JOB" in said
    tokens = [path.read_text().strip() for path in (home / "token", *home.glob("ray-token-*"))]
    assert len(tokens) == 2 and not [token for token in tokens if token in said]
    assert not [line for line in said.splitlines() if line.startswith(("RAY_", "POLYFLEET_HOME"))]


def test_a_server_that_is_killed_comes_back_and_adopts_what_runs(fleet: Orchestrator, reference: JobHandle):
    adopted = fleet.job(reference.id)
    assert adopted.view["attempt"] == 1 and sorted(losses(adopted)) == list(range(1, STEPS + 1))


def test_a_higher_priority_preempts_and_the_victim_goes_on_at_its_step(
    fleet: Orchestrator, training: Training, reference: JobHandle
):
    victim = training.holds(resources={"pool": "cpu"})
    urgent = fleet.submit(RunJob(command="true", priority=10, resources={"pool": "cpu"}))
    assert urgent.wait(LIMIT_S).state == "SUCCEEDED"
    assert victim.result(LIMIT_S)["returned"] == {"first": HOLD_AT}
    view = victim.view
    assert [attempt["outcome"] for attempt in view["attempts"]] == ["preempted", "succeeded"]
    assert (view["resumed_step"], view["interruptions"], view["restarts"]) == (HOLD_AT, 1, 0)
    assert losses(victim) == losses(reference)


def test_a_training_whose_rank_is_killed_resumes_on_the_next_kind(
    fleet: Orchestrator, training: Training, reference: JobHandle, home: Path
):
    job = training.holds(resources={"ordered": [{"pool": "other"}, {"pool": "cpu"}]})
    [rank] = fleet_processes.ranks(job.id, home)
    rank.kill()
    training.go_on()
    assert job.result(LIMIT_S)["returned"] == {"first": SAVE_EVERY}
    view = job.view
    assert [attempt["pool"] for attempt in view["attempts"]] == ["other", "cpu"]
    assert (view["resumed_step"], view["interruptions"], view["restarts"]) == (SAVE_EVERY, 1, 0)
    assert losses(job) == pytest.approx(losses(reference), rel=1e-4)


def test_a_checkpoint_goes_to_the_other_kind_and_the_training_goes_on_there(
    fleet: Orchestrator, training: Training, reference: JobHandle, cli: Cli
):
    [tenth] = [c for c in json.loads(cli("checkpoint", "list", reference.id, "-o", "json").stdout) if c["step"] == 10]
    copied = json.loads(cli("checkpoint", "copy", f"cpu:{tenth['path']}", "other:moved", "-o", "json").stdout)
    same = cli("checkpoint", "diff", f"cpu:{tenth['path']}", copied["target"], "-o", "json")
    assert (same.returncode, json.loads(same.stdout)["same"]) == (0, True), same
    job = training.submit(resources={"pool": "other"}, checkpoint={"resume_from": copied["target"]})
    assert job.result(LIMIT_S)["returned"] == {"first": 10}
    there = losses(job)
    assert there == pytest.approx({step: losses(reference)[step] for step in there}, rel=1e-4)


def test_the_pools_are_compared_in_turns_with_their_numbers_checked(fleet: Orchestrator, emulated: bool, cli: Cli):
    brief = ("--level", "O0", "--max-rounds", "6", "--rounds", "6", "--case-seconds", "0.05")
    done = cli("benchmark", "run", "rmsnorm", "--pools", "cpu,other", *brief, "-o", "json")
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["results"]
    assert {cell["pool"] for cell in cells} == ({"cpu", "other"} if emulated else {cells[0]["pool"]})
    assert all(cell["status"] == "measured" and cell["accuracy"]["ok"] for cell in cells), cells


def test_a_cancelled_job_leaves_no_process(fleet: Orchestrator):
    job = fleet.submit(RunJob(command="setsid sleep 300 & sleep 300"))
    wait_for(lambda: job.state == "RUNNING" and len(fleet_processes.of_job(job.id)) >= 3, job.logs)
    assert job.cancel().state == "CANCELLED"
    wait_for(lambda: not fleet_processes.of_job(job.id))


def test_down_leaves_no_process(fleet: Orchestrator, home: Path, cli: Cli):
    job = fleet.submit(RunJob(command="sleep 300"))
    wait_for(lambda: job.state == "RUNNING", limit_s=LIMIT_S)
    assert cli("down").returncode == 0
    assert fleet_record.read() is None
    wait_for(lambda: not fleet_processes.of_home(home) and not fleet_processes.of_job(job.id))
    assert not (home / "server.json").exists()
