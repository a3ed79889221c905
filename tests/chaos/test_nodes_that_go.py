"""Nodes that are told to go, with and without the time that was promised."""

import os
import signal
import time

import fleet_processes
import psutil
import pytest

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("killed_after_s", [0.0, 5.0, 30.0])
def test_a_notice_lets_a_training_save_and_move(case, fleet, seed, killed_after_s, monkeypatch):
    with case("F23", f"SIGTERM of a node, SIGKILL of all of it {killed_after_s:.0f} s later", seed) as now:
        training = now.single()
        monkeypatch.setenv("POLYFLEET_REPAIR", "off")
        fleet.restarted()
        start = fleet_processes.start_of("right-0")
        now.inject(lambda: os.kill(start.pid, signal.SIGTERM))
        before = training.lines("step")[-1]["step"]
        time.sleep(killed_after_s)
        for process in machine_of(fleet):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        now.goes_on(training)
        view = now.view(training.id)
        assert view["attempts"][-1]["pool"] == "left" and view["restarts"] == 0
        if killed_after_s >= 30:  # what it was promised; P3 tells of less
            assert view["resumed_step"] >= before, "it did not save"
        monkeypatch.delenv("POLYFLEET_REPAIR")
        fleet.whole()


def machine_of(fleet):
    try:
        return fleet_processes.machine(fleet.home, "right-0")
    except psutil.NoSuchProcess:
        return []
