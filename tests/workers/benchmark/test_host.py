"""How busy a machine was: from two states, each of them plain data."""

import os
import subprocess
import sys
import time

import pytest

from workers.benchmark import host


def state(pressure=0.0, total=100.0, steal=0.0, busy=10.0, load=0.1):
    times = {"total": total, "busy": busy, "steal": steal}
    return {"pressure_cpu": pressure, "cpu_times": times, "load_1min": load, "cpus": 2}


@pytest.mark.parametrize(
    ("before", "after", "expected", "reason"),
    [
        (state(), state(total=200), "quiet", ""),
        (state(), state(pressure=30, total=200), "shared", "waited for a CPU 30 %"),
        (state(), state(pressure=95, total=200), "unusable", "waited for a CPU 95 %"),
        (state(), state(total=200, steal=5), "shared", "the hypervisor took 5 %"),
        (state(), state(total=200, steal=40), "unusable", "the hypervisor took 40 %"),
        (state(None, load=3), state(None, total=200), "shared", "load average 3.0 on 2 CPUs"),
    ],
)
def test_a_host_is_classed_by_pressure_and_steal(before, after, expected, reason):
    told = host.classify(before, after)
    assert told["class"] == expected
    assert (told["reasons"] == []) if not reason else any(reason in r for r in told["reasons"])


def test_this_machine_tells_its_state_and_who_it_is():
    told = host.state()
    assert told["cpus"] >= 1 and told["cpu_times"]["total"] > 0
    assert host.classify(told, host.state())["class"] in ("quiet", "shared", "unusable")
    assert host.identity() == host.identity() != ""
    assert host.last_level_cache_bytes() >= 1 << 20


def test_a_slowed_device_or_one_that_others_use_is_shared():
    hot = state(total=200) | {"device": {"slowed_by": ["heat (hardware)"], "others": [4711]}}
    told = host.classify(state(), hot)
    assert told["class"] == "shared"
    assert told["reasons"] == [
        "the device's clock was slowed by heat (hardware)", "1 other processes used the device",
    ]  # fmt: skip


def test_a_busy_process_of_somebody_else_is_named_and_ours_is_not(monkeypatch):
    monkeypatch.setattr(host, "MAX_BUSY_PROCESSES", 1000)  # whatever else is busier here
    spin = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spin) as theirs, subprocess.Popen(spin) as ours:
        try:
            others, busiest = host.BusyProcesses(), []
            for _ in range(300):  # beside others it may take a while to get a share of a CPU
                time.sleep(0.3)
                busiest = others.busiest([ours.pid])
                assert not {ours.pid, os.getpid()} & {one["pid"] for one in busiest}
                if any(one["pid"] == theirs.pid for one in busiest):
                    break
        finally:
            theirs.kill()
            ours.kill()
    assert any(one["pid"] == theirs.pid and one["cpus"] > 0 for one in busiest)
    told = host.classify(state(), state(pressure=30, total=200) | {"busiest": busiest})
    assert any("other processes used CPUs: " in reason for reason in told["reasons"])
