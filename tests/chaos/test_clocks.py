"""The wall clocks of the server, the nodes' agents and the ranks are set, forth and back, while jobs run."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from faults import case, until

pytestmark = pytest.mark.chaos
HOUR, YEAR = 3600, 365 * 86400
"""Seconds."""
SETTINGS = [(HOUR, "+1 h"), (-HOUR, "-1 h"), (10 * YEAR, "+10 years"), (-10 * YEAR, "-10 years")]
RAY_ALONE = Path(__file__).with_name("ray_and_clocks.py")


class Clock:
    """What every process started with `variables` takes for the time is `by_s` off from then on. `ray`: Ray's own two
    programs, raylet and gcs_server, are among them.
    """

    def __init__(self, folder: Path, ray: bool):
        self._file, library = folder / "clock", folder / "clock.so"
        self.set(0)
        source = Path(__file__).with_name("skewed_clock.c")
        words = ["gcc", "-shared", "-fPIC", "-O2", *(["-DRAY_TOO"] if ray else []), "-o", str(library), str(source)]
        subprocess.run([*words, "-ldl"], check=True)
        self.variables = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}

    def set(self, by_s: int) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", by_s))


@pytest.fixture
def clock(tmp_path):
    """`clock(ray)`"""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed here, which makes the library that sets a process's clock")
    return lambda ray: Clock(tmp_path, ray)


def test_clocks_that_are_set_change_nothing(tmp_path, clock, seed, own_fleet, monkeypatch):
    ours = clock(ray=False)
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
        assert {now.view(t.id)["epoch"] for t in now.trainings} == {1}


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
    assert {now.view(t.id)["epoch"] for t in now.trainings} == {1}
    assert now.view(gang.id)["interruptions"] == 0


def seconds_of(text):
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def test_ray_alone_does_not_see_what_was_given_back_once_its_clock_was_set_back(clock):
    """Why Ray's two programs are left alone above: nothing of ours runs here. Ray 2.60 numbers the reports of a raylet
    by its wall clock. Where this fails, Ray has changed, and the clocks of its programs can be set above as well.
    """
    set_too = clock(ray=True)
    variables = os.environ | set_too.variables | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, str(RAY_ALONE)], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["free", "kept"], (done.stdout, done.stderr[-2000:])
