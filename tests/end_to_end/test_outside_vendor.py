"""A vendor from an installed distribution on a real fleet: its pool comes up, its devices are found by its own
discovery, and a job gets one of them, masked by its own variable and backed by its own Ray resource.
"""

import json
import os
import subprocess
import sysconfig
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.full
FLEET = """
name: toys
pools:
  play: {backend: toy, nodes: 1}
  cpu: {backend: cpu}
"""
TRAIN = """
import os

def train(ctx):
    info = ctx.backend.get_device_info()
    return {"kind": ctx.kind, "device": info.device_name, "shown": os.environ["TOY_VISIBLE_DEVICES"]}
"""
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def toys(toy_vendor: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """`polyfleet` of an environment of its own, in which the toy vendor is installed beside all that we need."""
    folder = tmp_path_factory.mktemp("toys")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    beside = [str(ROOT), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (site / "beside.pth").write_text("\n".join(beside))
    toy_vendor(site)
    (folder / "fleet.yaml").write_text(FLEET)
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text(TRAIN)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"POLYFLEET_HOME": str(folder / "home"), "TOY_DEVICES": "2"}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [folder / "env" / "bin" / "python", "-P", "-m", "orchestrator.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)

    up = run("up", "--file", "fleet.yaml")
    assert up.returncode == 0, up.stderr
    yield run
    run("down")


def told(done: "subprocess.CompletedProcess[str]") -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_devices_are_found_by_its_own_discovery_and_listed_beside_ours(toys: Cli):
    rows = {row["backend"]: row for row in told(toys("backends", "-o", "json"))}
    assert rows["toy"]["available"]
    assert rows["toy"]["title"] == "Toy accelerator"
    assert rows["toy"]["kinds"] == ["toy:T1-8GB"]
    assert len(rows["toy"]["devices"]) == 2


@pytest.mark.parametrize("word", ["toy", "plaything:t1", "T1-Mini"])
def test_a_job_runs_on_one_of_them_masked_by_its_own_variable(toys: Cli, word: str):
    task = ("--task", "train", "--entry", "train.py", "--working-dir", "code")
    job = told(toys("submit", "--accelerators", word, *task, "--wait", "-o", "json"))
    assert job["state"] == "SUCCEEDED"
    assert job["result"]["returned"] == {"kind": "toy:T1-8GB", "device": "A toy", "shown": "0"}


def test_a_gang_takes_both_and_a_third_is_never_there(toys: Cli):
    refused = toys("submit", "--accelerators", "toy:3", "--", "true")
    assert refused.returncode == 2
    assert "has 2 devices in all, but the job needs 3" in refused.stderr
