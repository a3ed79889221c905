"""The wall clocks of the server, the nodes' agents and the ranks are set, forth and back, while jobs run."""

import os
import shutil
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from faults import case, until

from cluster.nodes import ray_node

pytestmark = pytest.mark.chaos
HOUR, YEAR = 3600, 365 * 86400
"""Seconds."""
SETTINGS = [(HOUR, "+1 h"), (-HOUR, "-1 h"), (10 * YEAR, "+10 years"), (-10 * YEAR, "-10 years")]
RAY_ALONE = Path(__file__).with_name("ray_and_clocks.py")


class Clock:
    """What every process started with `variables` takes for the time is `by_s` off from then on. `spared`: names of
    programs that are left alone.
    """

    def __init__(self, folder: Path, *spared: str):
        self._file, library = folder / "clock", folder / "clock.so"
        self.set(0)
        source = Path(__file__).with_name("skewed_clock.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], check=True)
        given = {"CHAOS_CLOCK": str(self._file), "CHAOS_CLOCK_SPARES": " ".join(spared)}
        self.variables = {"LD_PRELOAD": str(library)} | given

    def set(self, by_s: int) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", by_s))


@pytest.fixture
def clock(tmp_path):
    """`clock("a program that is left alone")`"""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed here, which makes the library that sets a process's clock")
    return partial(Clock, tmp_path)


def test_clocks_that_are_set_change_nothing(tmp_path, clock, seed, own_fleet, monkeypatch):
    ours = clock("raylet", "gcs_server")
    for name, value in ours.variables.items():
        monkeypatch.setenv(name, value)
    fleet = own_fleet()
    for name in ours.variables:
        monkeypatch.delenv(name)  # the clock that this test measures by is left alone
    with case(fleet, tmp_path, "F20", told_of("+1 h"), seed) as now:
        gang = now.gang()
        for number, (by_s, how) in enumerate(SETTINGS):
            if number:
                now.fault("F20", told_of(how))
            set_clock(now, gang, ours, by_s)
        now.end.touch()
        until(lambda: now.view(gang.id)["state"] == "SUCCEEDED")
        steps = [r["step"] for r in fleet.o.job(gang.id).reports()]
        assert steps == sorted(set(steps))
        assert {now.view(t.id)["attempt"] for t in now.trainings} == {1}


def told_of(how):
    return f"clocks of server, agents and ranks are set by {how}, and back"


def set_clock(now, gang, clock, by_s):
    """A job that is submitted meanwhile runs after those that wait already, whatever the clock says."""
    now.inject(lambda: clock.set(by_s))
    now.told(gang)
    saved = until(lambda: [s for s in gang.lines("saved") if s["at_s"] > now.at_s][1:])
    until(lambda: (now.view(gang.id)["checkpoint"] or {}).get("step", 0) >= saved[0]["step"])
    job = now.run("true", resources={"pool": "left"})
    there = now.view(job)["submitted_at"]
    here_s = abs(seconds_of(there) - seconds_of(now.at.isoformat()))
    assert here_s > abs(by_s) / 2, f"the server's clock was not set: {there}"
    now.record["injected"] = by_s
    now.inject(lambda: clock.set(0))
    now.told(gang, "told_after_step_back_s")
    assert {now.view(t.id)["attempt"] for t in now.trainings} == {1}
    assert now.view(gang.id)["interruptions"] == 0


def seconds_of(text):
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def test_a_job_runs_soon_where_ray_has_lost_count_since_all_clocks_were_set_back(
    tmp_path, clock, seed, own_fleet, monkeypatch
):
    """Ray does not see what a gang gives back on both of its nodes: they are started again, one as a command waits for
    it, the other ones as probes do.
    """
    every = clock()
    every.set(HOUR)
    for name, value in every.variables.items():
        monkeypatch.setenv(name, value)
    fleet = own_fleet()
    for name in every.variables:
        monkeypatch.delenv(name)
    with case(fleet, tmp_path, "F20", "clocks of all programs, Ray's too, are set back by 1 h", seed) as now:
        gang = now.run(f"while [ ! -e {now.end} ]; do sleep 0.2; done", resources={"pool": "left", "nodes": 2})
        until(lambda: now.view(gang)["state"] == "RUNNING")
        now.inject(lambda: every.set(0))
        now.end.touch()
        until(lambda: now.view(gang)["state"] == "SUCCEEDED")
        now.over()
        waits = now.run("true", resources={"node": "left-0"})
        until(lambda: now.view(waits)["state"] == "SUCCEEDED")
        now.took("ended_s", time.monotonic() - now.at_s)
        assert "as free: nothing that Ray lists uses them" in now.view(waits)["attempts"][0]["reason"]


def test_ray_alone_misses_what_was_given_back_and_a_dead_node_once_its_clock_was_set_back(clock):
    """Nothing of ours runs here. Where this fails, Ray has changed, and docs/reliability.md with it."""
    found = {name: value for name, value in ray_node.SETTINGS.items() if name.startswith("RAY_health_check")}
    variables = os.environ | clock().variables | found | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, str(RAY_ALONE)], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [line for line in done.stdout.splitlines() if line.startswith(("free", "kept"))]  # Ray tells more
    assert told == ["free dead", "kept alive"], (done.stdout[-2000:], done.stderr[-2000:])
