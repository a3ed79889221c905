"""The head of a fleet is away for minutes: what runs goes on, what is new waits, and then all is as before."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults
import psutil
import pytest

from cluster import fleet_record
from cluster.processes import family
from orchestrator import Orchestrator, RunJob

pytestmark = pytest.mark.chaos

FLEET = """
name: outage
pools:
  left: {backend: cpu}
  right: {backend: cpu}
"""
COUNTS = "i=0; while [ ! -e {end} ]; do i=$((i + 1)); echo $i; sleep 1; done"
PATIENCE_S = 120.0


def until(truth: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (seen := truth()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s in vain; last seen {seen!r}"
        time.sleep(0.1)
    return seen


@pytest.fixture(scope="module")
def fleet_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file: Path = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    file.write_text(FLEET)
    return file


@pytest.fixture(scope="module")
def fleet(fleet_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchestrator]:
    """Its server leaves lost nodes as they are, so that an outage is as long as it is meant to be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYFLEET_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("POLYFLEET_REPAIR", "off")
        with Orchestrator.up(fleet_file) as o:
            yield o
            o.down()


def head() -> list[psutil.Process]:
    record = fleet_record.read()
    assert record is not None and record.head is not None
    return family([record.head.process])


def state_server() -> psutil.Process:
    return next(p for p in head() if p.name() == "gcs_server")


def outlasts(
    fleet: Orchestrator, end: Path, outage_s: float, begin: Callable[[], Any], heal: Callable[[], Any], told: str
) -> None:
    """A job with a lease of 10 s runs from before the outage until after it; another one waits for its end."""
    record = {"fault": told[:2], "what": f"{told[4:]} for {outage_s:.0f} s", "seed": 0, "case": faults.case_name()}
    record |= {"load": round(os.getloadavg()[0], 1), "outcome": "held"}
    try:
        record["ended_s"] = _outlasts(fleet, end, outage_s, begin, heal)
    except Exception as e:
        record |= {"outcome": "failed", "error": repr(e)[:2000]}
        raise
    finally:
        if "ended_s" in record or "error" in record:
            faults.keep(record)


def _outlasts(
    fleet: Orchestrator, end: Path, outage_s: float, begin: Callable[[], Any], heal: Callable[[], Any]
) -> float:
    """Seconds from when the head begins to come back until the job that waited has ended."""
    command = COUNTS.format(end=end)
    running = fleet.submit(RunJob(command=command, resources={"pool": "right"}, recovery={"lease": "10s"}))
    until(lambda: running.state == "RUNNING")
    begin()
    began = time.monotonic()
    waiting = fleet.submit(RunJob(command="true", resources={"pool": "left"}))
    if outage_s > 10:
        until(lambda: "head" in waiting.view["reason"])
    while time.monotonic() < began + outage_s:
        assert (running.state, running.view["epoch"]) == ("RUNNING", 1)
        time.sleep(1)
    over = time.monotonic()
    heal()
    until(lambda: waiting.state == "SUCCEEDED")
    took_s = round(time.monotonic() - over, 2)
    end.touch()
    assert running.wait(60).state == "SUCCEEDED"
    assert (running.view["epoch"], running.view["interruptions"]) == (1, 0)
    numbers = str(running.logs()).split()
    assert numbers == [str(i) for i in range(1, len(numbers) + 1)] and len(numbers) >= outage_s * 0.8
    until(lambda: {n["state"] for n in fleet.inventory()} == {"ready"})
    return took_s


@pytest.mark.parametrize("outage_s", [5.0, 65.0, 300.0])
def test_a_frozen_state_server(fleet: Orchestrator, tmp_path: Path, outage_s: float):
    frozen = state_server()
    outlasts(fleet, tmp_path / "end", outage_s, frozen.suspend, frozen.resume, "F5, the head's state server is frozen")


@pytest.mark.parametrize("outage_s", [65.0])
def test_a_killed_head(fleet: Orchestrator, fleet_file: Path, tmp_path: Path, outage_s: float):
    def kill() -> None:
        for process in head():
            process.kill()

    outlasts(
        fleet,
        tmp_path / "end",
        outage_s,
        kill,
        lambda: Orchestrator.up(fleet_file).close(),
        "F6, all of the head is away",
    )
