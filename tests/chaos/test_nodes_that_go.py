"""Nodes that are told to go, with and without the time that was promised, and one whose storage is full."""

import os
import signal
import subprocess
import time

import fleet_processes
import psutil
import pytest
from faults import FLEET, Fleet, case, until

pytestmark = pytest.mark.chaos
FULL_BYTES = 24 << 20


@pytest.mark.parametrize("killed_after_s", [0.0, 5.0, 30.0])
def test_a_notice_lets_a_training_save_and_move(case, fleet, seed, killed_after_s, monkeypatch):
    monkeypatch.setenv("POLYFLEET_REPAIR", "off")
    with case("F23", f"SIGTERM of a node, SIGKILL of all of it {killed_after_s:.0f} s later", seed) as now:
        training = now.single()
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
        if killed_after_s >= 5:
            assert view["resumed_step"] >= before, "it did not save"
        monkeypatch.delenv("POLYFLEET_REPAIR")
        fleet.whole()


def machine_of(fleet):
    try:
        return fleet_processes.machine(fleet.home, "right-0")
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def small_storage(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir(mode=0o700)
    words = ["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES},mode=700", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_storage_is_named_and_its_training_goes_on_once_there_is_space(
    small_storage, tmp_path, seed, monkeypatch
):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("POLYFLEET_HOME", str(home))
    fleet = Fleet(home, FLEET.replace("right: {backend: cpu}", f"right: {{backend: cpu, storage: {small_storage}}}"))
    try:
        with case(fleet, tmp_path, "F16", "the disk of a pool's checkpoints is full for 10 s", seed) as now:
            again = {"on_events": {"storage": "retry"}, "backoff": "1s"}
            full = now.train(resources={"pool": "right"}, recovery=again)
            other = now.train(resources={"pool": "left"})
            now.works()
            fills = small_storage / "fills"
            now.inject(lambda: fill(fills))
            said = until(lambda: [a for a in now.view(full.id)["attempts"] if "is full" in a["reason"]])
            now.took("named_s", time.monotonic() - now.at_s)
            assert str(small_storage) in said[0]["reason"]
            time.sleep(max(0.0, 10 - now.record["named_s"]))
            now.at_s = time.monotonic()
            fills.unlink()
            now.goes_on(full, newer=False)
            until(lambda: full.lines("saved")[-1]["at_s"] > now.at_s)
            assert other.epoch == 1 and other.steps_since(now.at_s)
    finally:
        fleet.down()


def fill(file):
    with file.open("wb") as f:
        try:
            while True:
                f.write(b"x" * 65536)
        except OSError:
            pass
