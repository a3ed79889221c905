"""A real fleet for these tests: a server, a Ray head, and three nodes in two pools, all real processes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator import Orchestrator
from orchestrator.client import client

sys.path.insert(0, str(Path(__file__).parents[1]))  # helpers of all tests; nothing else is called like them

import fleet_processes
from patience import wait_for

FLEET = """
name: test
pools:
  left: {backend: cpu, nodes: 2}
  right: {backend: cpu, env: {WHICH: right}, environment: {interpreter: %s}}
"""
"""The ranks of `right` run from a Python without Ray, so that its node cannot."""
ALIVE = ["PENDING", "STARTING", "RUNNING", "SAVING", "RECOVERING"]

TRAIN = """
import os, time, torch

def train(ctx):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ctx.prepare(model, optimizer)
    restored = ctx.checkpoint.restore({"model": model, "optimizer": optimizer})
    first = restored.step if restored else 0
    for step in range(first + 1, ctx.arguments["steps"] + 1):
        loss = model(torch.ones(3, 4)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        ctx.report(step=step, of=ctx.arguments["steps"], loss=loss)
        if step % ctx.arguments.get("save_every", 5) == 0 or ctx.preempted:
            ctx.checkpoint.save(step, {"model": model, "optimizer": optimizer})
        while step == ctx.arguments.get("hold_at") and not os.path.exists(ctx.arguments["go_on"]):
            time.sleep(0.02)
        if ctx.preempted:
            return {"stopped_at": step}
        time.sleep(ctx.arguments.get("pause_s", 0.0))
    return {"first": first, "ranks": ctx.world_size}
"""


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    before = os.environ.get("POLYFLEET_HOME")
    os.environ["POLYFLEET_HOME"] = str(folder)
    yield folder
    os.environ.pop("POLYFLEET_HOME")
    if before is not None:
        os.environ["POLYFLEET_HOME"] = before


@pytest.fixture(scope="package")
def fleet_file(home: Path, rayless: Path) -> Path:
    file = home / "fleet.yaml"
    file.write_text(FLEET % rayless)
    return file


@pytest.fixture(scope="package")
def shared_fleet(fleet_file: Path) -> Iterator[Orchestrator]:
    o = Orchestrator.up(fleet_file)
    yield o
    with Orchestrator.connect() as last:
        last.down()


@pytest.fixture
def fleet(shared_fleet: Orchestrator, fleet_file: Path) -> Iterator[Orchestrator]:
    """The fleet, whole at the start of every test: lost nodes are started again, a killed server too, all is free."""
    with Orchestrator.up(fleet_file) as o:
        wait(lambda: {(node["state"], bool(leased(node))) for node in o.inventory()} == {("ready", False)})
        yield o
    with Orchestrator.connect() as o:
        for job in o.jobs.list(ALIVE):
            o.jobs.cancel(job["id"])
        with client.connect() as asked:
            for node in asked.nodes.list():  # one that tests have killed three times is quarantined
                asked.nodes.resume(node["node"])
        wait(lambda: not o.jobs.list(ALIVE))


def leased(node: dict[str, Any]) -> list[str]:
    """Jobs that hold devices there, also cancelled ones whose processes have not ended yet."""
    return [device["allocated_to"] for device in node["devices"] if device["allocated_to"]]


@pytest.fixture
def unrepaired(fleet: Orchestrator, cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orchestrator]:
    """The fleet with a server that leaves lost nodes as they are."""
    monkeypatch.setenv("POLYFLEET_REPAIR", "off")
    assert [cli("server", verb).returncode for verb in ("stop", "start")] == [0, 0]
    with Orchestrator.connect() as o:
        yield o
    monkeypatch.delenv("POLYFLEET_REPAIR")
    assert [cli("server", verb).returncode for verb in ("stop", "start")] == [0, 0]


wait = partial(wait_for, limit_s=180.0)
"""For what a fleet does beside other tests."""


@pytest.fixture
def until() -> Callable[..., Any]:
    return wait


@pytest.fixture
def processes_of() -> Callable[[str], list[psutil.Process]]:
    """Every process that carries a job's mark, wherever it hides."""
    return fleet_processes.of_job


@pytest.fixture
def raylet_of() -> Callable[[str], psutil.Process]:
    """The raylet of one of our nodes, to be killed as a crash would."""
    return fleet_processes.raylet


@pytest.fixture
def state_server() -> Callable[[], psutil.Process]:
    """The process of the head that holds the cluster's state."""
    return fleet_processes.state_server


@pytest.fixture
def agent_of(home: Path) -> Callable[[str], psutil.Process]:
    """The agent of one of our nodes."""
    return partial(fleet_processes.agent, home)


@pytest.fixture
def cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([Path(sys.executable).with_name("polyfleet"), *words], capture_output=True, text=True)

    return run


@pytest.fixture(scope="session")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training, alone in its folder."""
    file = tmp_path_factory.mktemp("train") / "train.py"
    file.write_text(TRAIN)
    return file


@pytest.fixture
def training(tmp_path: Path) -> dict[str, Any]:
    """Fields of a job that takes a tenth of a second per step and saves every five."""
    (tmp_path / "train.py").write_text(TRAIN)
    return {"entry": "train.py", "working_dir": str(tmp_path), "arguments": {"steps": 40, "pause_s": 0.1}}
