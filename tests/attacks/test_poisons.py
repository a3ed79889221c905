"""While job code poisons its node, other jobs run, `doctor` names the culprit, and cancel frees its device."""

import os
import runpy
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from live_folders import list_files, read_text
from patience import wait_for

from orchestrator import JobHandle, Orchestrator, RunJob

pytestmark = pytest.mark.full

POISON = Path(__file__).with_name("poison.py")
FLEET = """
name: poisoned
pools:
  crowded: {backend: cpu, devices: 3}
  apart: {backend: cpu}
"""
PATIENCE_S = 180.0


wait = partial(wait_for, limit_s=PATIENCE_S)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchestrator]:
    home = tmp_path_factory.mktemp("poisoned")
    file = home / "fleet.yaml"
    file.write_text(FLEET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYFLEET_HOME", str(home))
        with Orchestrator.up(file) as up:
            yield up
            up.down()


@pytest.fixture
def submitted(fleet: Orchestrator, tmp_path: Path) -> Callable[[str], JobHandle]:
    def submit(poison: str) -> JobHandle:
        shutil.copy(POISON, tmp_path)
        job = RunJob(
            name=poison.replace("_", "-"),
            command=["python", "poison.py", poison],
            working_dir=str(tmp_path),
            resources={"pool": "crowded"},
            recovery={"lease": "5s", "max_restarts": 0, "max_interruptions": 0},
        )
        return fleet.submit(job)

    return submit


def pids_of(job: JobHandle) -> list[int]:
    """What its code noted in its working folder, wherever the node keeps that."""
    paths = [path for path, _ in list_files(Path(os.environ["POLYFLEET_HOME"])) if path.name == "pid"]
    return [int(text) for path in paths if job.id in str(path) and (text := read_text(path))]


def holders(fleet: Orchestrator) -> set[str]:
    return {device["allocated_to"] for node in fleet.inventory() for device in node["devices"]} - {None}


def is_named(fleet: Orchestrator, job: JobHandle) -> bool:
    """By a finding; or it ended by itself, with a failure that says why."""
    view = job.view
    by_doctor = any(job.id in f"{finding}" for finding in fleet.fleet.doctor())
    return by_doctor or (view["state"] == "FAILED" and bool(view["failure"]["message"]))


@pytest.mark.parametrize("poison", runpy.run_path(str(POISON))["POISONS"])
def test_a_poison_harms_no_other_job_is_named_and_can_be_cancelled(fleet: Orchestrator, submitted, poison: str):
    culprit = submitted(poison)
    wait(lambda: pids_of(culprit) or culprit.state == "FAILED", "the poison to be in place")
    pids = pids_of(culprit)
    probes = [fleet.submit(RunJob(command="true", resources={"pool": pool})) for pool in ("crowded", "apart")]
    for probe in probes:
        assert probe.wait().state == "SUCCEEDED"
    wait(lambda: is_named(fleet, culprit), f"{culprit.id} to be named")
    culprit.cancel()
    wait(lambda: culprit.id not in holders(fleet), "its device to be free")
    wait(lambda: not any(map(psutil.pid_exists, pids)), "its processes to be gone")
