"""A training with a range of devices grows when one becomes free and shrinks when others want it, on a real fleet."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import JobHandle, Orchestrator, RunJob
from orchestrator.spec.job_spec import load_job

pytestmark = pytest.mark.full

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic" / "job.yaml"
FLEET = """
name: elastic
scheduler: {policy: finish_time, every_s: 2}
pools:
  cpu: {backend: cpu, devices: 2}
"""
STEPS = 3000
"""More than it makes in this test, so that a slow machine does not end it before it has shrunk."""


@pytest.fixture
def two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orchestrator]:
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    (tmp_path / "fleet.yaml").write_text(FLEET)
    with Orchestrator.up(tmp_path / "fleet.yaml") as o:
        yield o
    with Orchestrator.connect() as last:
        last.down()


def until_file(file: Path) -> RunJob:
    """It holds one device until the file is there."""
    return RunJob(command=f"until [ -e {file} ]; do sleep 0.1; done", resources={"accelerators": "cpu:1"})


def ranks_by_step(job: JobHandle) -> dict[int, int]:
    return {report["step"]: int(report["metrics"]["ranks"]) for report in job.reports()}


def newest_ranks(job: JobHandle) -> int:
    ranks = ranks_by_step(job)
    return ranks[max(ranks)]


def stop_reasons(job: JobHandle) -> list[str]:
    return [event["data"]["reason"] for event in job.history() if event["event"] == "preempted"]


def test_a_training_grows_to_a_device_that_became_free_and_makes_room_again(
    two_devices: Orchestrator, tmp_path: Path, until: Callable[..., Any]
):
    first = two_devices.submit(until_file(tmp_path / "first"))
    until(lambda: first.state == "RUNNING")
    spec = load_job(EXAMPLE)
    arguments = spec.arguments | {"steps": STEPS, "save_every": 5}
    elastic = two_devices.submit(spec.model_copy(update={"arguments": arguments}))
    until(lambda: 1 in ranks_by_step(elastic).values())
    (tmp_path / "first").touch()
    assert first.wait().state == "SUCCEEDED"
    until(lambda: newest_ranks(elastic) == 2)
    [grew] = stop_reasons(elastic)
    assert grew.startswith("moves to 2 cpu in pool cpu: about ") and "and the move costs about " in grew

    second = two_devices.submit(until_file(tmp_path / "second"))
    until(lambda: second.state == "RUNNING")
    until(lambda: newest_ranks(elastic) == 1)
    assert f"for {second.id} of the same priority, which gains more from them" in stop_reasons(elastic)[1]
    (tmp_path / "second").touch()
    assert second.wait().state == "SUCCEEDED"

    made = ranks_by_step(elastic)
    two_devices.jobs.cancel(elastic.id)
    assert set(made) == set(range(1, max(made) + 1)), "no step is missing: each attempt went on from a checkpoint"
    resumed = [event["data"]["step"] for event in elastic.history() if event["event"] == "resumed"]
    assert len(resumed) >= 2 and 0 < resumed[0] < resumed[1]
