"""Benchmark runs over a real fleet: exclusive nodes, killed sessions, lost nodes, a server that restarts."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import fleet_processes
import psutil
import pytest
from patience import LIMIT_S

from orchestrator import BenchmarkJob, JobFailed, Orchestrator, RunJob

pytestmark = pytest.mark.full

MODEL = """
import os, torch

def make():
    return torch.nn.Linear(16, 4)

def dies():
    os._exit(9)

def nan():
    return torch.nn.Threshold(9.0, float("nan"))

def sample_input(batch_size):
    return torch.rand(batch_size, 16)
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "m.py").write_text(MODEL)
    return str(tmp_path)


BRIEF = ("--case-seconds", "0.1")
"""Hardly warmed up, and in as few rounds as there may be: figures are not what is tested."""
LONG = ("--rounds", "1000", "--max-rounds", "1000", "--case-seconds", "60")


def cells(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{cell['case']}@{cell['target']}": cell for cell in report["results"]}


def test_two_nodes_are_measured_in_turns_while_each_is_held_whole(fleet: Orchestrator, cli):
    done = cli("benchmark", "run", "rmsnorm", "mlp/forward", "--all-devices", "--max-rounds", "9", *BRIEF, "-o", "json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [c["target"] for c in told["targets"]] == ["cpu@left-0", "cpu@left-1", "cpu@right-0"]
    assert {c["node"] for c in told["targets"]} == {"left-0", "left-1", "right-0"}
    assert len(told["results"]) == 6 and {c["status"] for c in told["results"]} == {"measured"}
    assert all(c["accuracy"]["ok"] and c["rounds"] == 9 for c in told["results"])
    lines = [
        json.loads(line) for line in cli("benchmark", "report", told["run"], "--format", "jsonl").stdout.splitlines()
    ]
    turns = sorted((b["at"], line["target"]) for line in lines if line["line"] == "result" for b in line["blocks"])
    assert len({column for _, column in turns[:6]}) == 3  # interleaved: nobody had all its rounds first
    assert {job["state"] for job in fleet.jobs.list() if job["name"].startswith(told["run"])} == {"SUCCEEDED"}


def test_a_model_of_the_user_is_measured_and_its_faults_are_told(fleet: Orchestrator, folder: str):
    good = fleet.benchmarks.run(
        entry="m.py:make", working_dir=folder, batch_size=4, pools=["right"], max_rounds=9, case_s=0.1
    )
    assert {c["status"] for c in good["results"]} == {"measured"} and good["results"][0]["items"] == 4
    dead = fleet.benchmarks.run(
        entry="m.py:dies", working_dir=folder, pools=["right"], max_rounds=9, case_s=0.1, train=False
    )
    assert dead["results"][0]["status"] == "failed" and "exit code 9" in dead["results"][0]["reason"]
    nan = fleet.benchmarks.run(
        entry="m.py:nan", working_dir=folder, pools=["right"], max_rounds=9, case_s=0.1, train=False
    )
    assert (nan["results"][0]["status"], "no value is finite" in nan["results"][0]["reason"]) == ("wrong", True)


def test_a_benchmark_job_is_measured_on_its_one_device_and_shown(fleet: Orchestrator, folder: str, cli):
    def job(**arguments: Any) -> BenchmarkJob:
        where = {"working_dir": folder, "resources": {"pool": "right"}}
        return BenchmarkJob(entry="m.py:make", batch_size=4, arguments=arguments, **where)

    submitted = fleet.submit(job(rounds=7))
    result = submitted.result()
    assert [(row["case"], row["status"], len(row["samples_s"])) for row in result["rows"]] == [
        ("forward", "measured", 7),
        ("training_step", "measured", 7),
    ]
    assert all(
        row["accuracy"]["ok"] and row["ci_low_s"] <= row["median_s"] <= row["ci_high_s"] for row in result["rows"]
    )
    assert [report["step"] for report in submitted.reports()] == [1, 2, 3, 4, 5, 6, 7]
    shown, said = cli("show", submitted.id).stdout, cli("logs", submitted.id).stdout
    assert "PER CALL" in shown and "last report  step=7" in shown and "samples_s" not in shown
    assert [line.partition(":")[0] for line in said.splitlines()] == ["forward", "training_step"] * 2
    with pytest.raises(JobFailed, match="rounds is 0; give an integer of at least 1"):
        fleet.submit(job(rounds=0)).result()


def begun(cli, *words: str) -> str:
    """As torch has it, and hardly warmed up: what is compiled is measured above."""
    return str(cli("benchmark", "run", "--level", "O0", *BRIEF, *words, "--detach").stdout.strip())


def progress(fleet: Orchestrator, run: str) -> dict[str, Any]:
    return next(view for view in fleet.benchmarks.list() if view["run"] == run)


def test_a_killed_session_costs_its_cell_and_the_run_goes_on(fleet: Orchestrator, cli, until, processes_of):
    run = begun(cli, "softmax", "gpt2/forward", "--pools", "right", "--case-seconds", "4", "--max-rounds", "500")
    until(lambda: progress(fleet, run)["progress"].get("round", 0) >= 2)
    [job] = [job["id"] for job in fleet.jobs.list() if job["name"].startswith(run)]
    for process in processes_of(job):
        if "workers.tasks.rank_main" in " ".join(process.cmdline()):
            process.kill()
    until(lambda: progress(fleet, run)["state"] == "SUCCEEDED")
    told = cells(fleet.benchmarks.report(run))
    assert told["softmax/256x4096@cpu"]["status"] == "failed"
    assert "SIGKILL" in told["softmax/256x4096@cpu"]["reason"]
    assert {c["status"] for name, c in told.items() if name.startswith("gpt2")} == {"measured"}


def test_a_lost_node_is_a_lost_column_and_the_others_go_on(unrepaired: Orchestrator, cli, until, home: Path):
    """It stays away: its session would be a failed one for the node that is started in its place. Forty rounds take
    some seconds, amid which it is lost.
    """
    words = ("softmax", "rmsnorm", "--all-devices", "--pools", "left", "--rounds", "40")
    run = begun(cli, *words)
    until(lambda: progress(unrepaired, run)["progress"].get("round", 0) >= 2)
    for process in fleet_processes.machine(home, "left-1"):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    until(lambda: progress(unrepaired, run)["state"] == "SUCCEEDED")
    told = cells(unrepaired.benchmarks.report(run))
    assert {told[f"{case}@cpu@left-1"]["status"] for case in ("softmax/256x4096", "rmsnorm/256x4096")} == {"lost"}
    assert {told[f"{case}@cpu@left-0"]["status"] for case in ("softmax/256x4096", "rmsnorm/256x4096")} == {"measured"}


def test_a_run_goes_on_after_its_server_was_killed(fleet: Orchestrator, cli, until, home: Path):
    run = begun(cli, "softmax", "rmsnorm", "layernorm", "--pools", "right", "--max-rounds", "12")
    until(lambda: progress(fleet, run)["results"] >= 1)
    server = psutil.Process(json.loads((home / "server.json").read_text())["pid"])
    server.kill()
    server.wait(LIMIT_S)
    with Orchestrator.connect() as again:
        until(lambda: progress(again, run)["state"] == "SUCCEEDED")
        report = again.benchmarks.report(run)
    assert [c["status"] for c in report["results"]] == ["measured"] * 3
    lines = [json.loads(line) for line in cli("benchmark", "report", run, "--format", "jsonl").stdout.splitlines()]
    assert [line["case"] for line in lines if line["line"] == "case"].count("softmax/256x4096") == 1


def test_a_run_waits_its_turn_and_cancelling_it_lets_go_of_its_nodes(fleet: Orchestrator, cli, until):
    """It is long enough for a command that cancels it to start meanwhile, on a machine as busy as may be."""
    holder = fleet.submit(RunJob(command="sleep 300", resources={"pool": "right"}))
    until(lambda: holder.state == "RUNNING")
    run = begun(cli, "softmax", "--pools", "right", *LONG)
    assert progress(fleet, run)["state"] == "WAITING"
    holder.cancel()
    until(lambda: progress(fleet, run)["state"] == "RUNNING")
    cancelled = json.loads(cli("benchmark", "cancel", run, "-o", "json").stdout)
    assert (cancelled["state"], cancelled["reason"]) == ("CANCELLED", "cancelled by the user")
    until(lambda: all(j["state"] == "CANCELLED" for j in fleet.jobs.list() if j["name"].startswith(run)))
