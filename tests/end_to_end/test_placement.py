"""What was measured decides: the same job, before and after a benchmark run on a mixed cluster."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import environments
from cluster.errors import NotFound
from orchestrator import Orchestrator, TrainJob

MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

def sample_input(batch_size):
    return torch.rand(batch_size, 64)

def train(ctx):
    return {"kind": ctx.kind}
"""
FLEET = """
name: mixed
pools:
  cpu: {backend: cpu}
  xla: {backend: tpu, environment: xla, env: {PJRT_DEVICE: CPU}}
"""


@pytest.fixture
def mixed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orchestrator]:
    """A fleet of its own, of a CPU pool and an XLA pool."""
    try:
        environments.path("xla")
    except NotFound:
        pytest.skip("the environment xla is not made here")
    home = tmp_path_factory.mktemp("mixed")
    monkeypatch.setitem(os.environ, "POLYFLEET_HOME", str(home))
    (home / "fleet.yaml").write_text(FLEET)
    o = Orchestrator.up(home / "fleet.yaml")
    yield o
    o.down()


def test_the_same_job_lands_where_its_folder_was_measured_faster(mixed: Orchestrator, tmp_path: Path):
    (tmp_path / "m.py").write_text(MODEL)
    wanted = {"any_of": [{"pool": "xla"}, {"pool": "cpu"}]}
    job = TrainJob(entry="m.py", working_dir=str(tmp_path), resources=wanted, objective="throughput")
    before = mixed.submit(job)
    assert before.result(120)["returned"] == {"kind": "tpu:emulated"}
    assert "throughput of this job is unmeasured" in str(before.history())
    measured = mixed.benchmark(entry="m.py:make", working_dir=str(tmp_path), batch_size=32, max_rounds=9, case_s=3)
    rate = {c["column"]: c["items_per_s"] for c in measured["cells"] if c["mode"] == "train"}
    assert rate["cpu"] > rate["tpu:emulated"]  # lazy tensors on a CPU pay for each tiny step
    after = mixed.submit(job)
    assert after.result(120)["returned"] == {"kind": "cpu"}
    [placed] = [e for e in after.history() if e["event"] == "placed"]
    assert f"in {measured['run']}" in placed["data"]["reason"] and "samples/s" in placed["data"]["reason"]
    told = str(mixed.explain(after.id))
    assert told.count("measured") >= 2 and "unmeasured" not in told
