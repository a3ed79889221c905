"""The wall clocks of the server, the nodes' agents and the ranks are set, forth and back, while jobs run."""

import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest
from faults import Fleet, case, until

pytestmark = pytest.mark.chaos
HOUR, YEAR = 3600, 365 * 86400
"""Seconds."""


class Clock:
    """What every process started with `variables` takes for the time is `by_s` off from then on."""

    def __init__(self, folder: Path):
        self._file, library = folder / "clock", folder / "clock.so"
        self.set(0)
        source = Path(__file__).with_name("skewed_clock.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], check=True)
        self.variables = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}

    def set(self, by_s: int) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", by_s))


@pytest.fixture
def clock(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed here, which makes the library that sets a process's clock")
    return Clock(tmp_path)


def test_clocks_that_are_set_change_nothing(tmp_path, clock, seed, monkeypatch):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("POLYFLEET_HOME", str(home))
    with monkeypatch.context() as skewed:
        for name, value in clock.variables.items():
            skewed.setenv(name, value)
        fleet = Fleet(home)
    try:
        for by_s, told in [(HOUR, "+1 h"), (-HOUR, "-1 h"), (10 * YEAR, "+10 years"), (-10 * YEAR, "-10 years")]:
            folder = tmp_path / told
            folder.mkdir()
            with case(fleet, folder, "F20", f"clocks of server, nodes and ranks are set by {told}", seed) as now:
                set_clock(now, fleet, clock, by_s, monkeypatch)
    finally:
        clock.set(0)
        fleet.down()


def set_clock(now, fleet, clock, by_s, monkeypatch):
    """The server is started anew under the clock: `Fleet` starts one without it."""
    from orchestrator.server import daemon

    daemon.stop_server(fleet.home)
    with monkeypatch.context() as skewed:
        for name, value in clock.variables.items():
            skewed.setenv(name, value)
        fleet.reconnected()
    gang = now.gang()
    first = now.view(gang.id)
    now.inject(lambda: clock.set(by_s))
    now.told(gang)
    until(lambda: len([s for s in gang.lines("saved") if s["at_s"] > now.at_s]) >= 2)
    newest = max(s["step"] for s in gang.lines("saved"))
    until(lambda: (now.view(gang.id)["checkpoint"] or {}).get("step", 0) >= newest)
    after = now.run("true", resources={"pool": "left"})  # submitted last, though its clock may say first
    waits = [job for job in now.expected if job not in {t.id for t in now.trainings}]
    now.inject(lambda: clock.set(0))
    now.told(gang, "told_after_step_back_s")
    assert {now.view(t.id)["epoch"] for t in now.trainings} == {1}
    assert now.view(first["id"])["interruptions"] == 0
    now.end.touch()
    placed = {job: until(lambda job=job: now.view(job)["state"] == "SUCCEEDED" and now.view(job)) for job in waits}
    steps = [r["step"] for r in fleet.o.job(gang.id).reports()]
    assert steps == sorted(set(steps))
    assert after in placed
    time.sleep(0)
