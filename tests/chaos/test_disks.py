"""Disks that are slow, fail or are full, under the job store and under checkpoints, and then are well again."""

import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest
from faults import until

from cluster.errors import FleetError, PolyfleetError
from orchestrator.client import client, transport

pytestmark = pytest.mark.chaos
LASTS_S = 12.0
WAYS = {
    "slow": ("F14", "each sync of the job store takes 0.3 s more", "fdatasync:delay_enter=300000"),
    "failing": ("F15", "each sync of the job store fails (EIO)", "fdatasync:error=EIO"),
    "full": ("F16", "no write of the job store finds space (ENOSPC)", "pwrite64:error=ENOSPC"),
}


@contextmanager
def injected(now, server, act, absent):
    """strace acts on the server's system calls; how many is in the record."""
    told = now.folder / "strace"
    if shutil.which("strace") is None:
        absent("strace", "strace is not here")
    words = ["strace", "-f", "-q", "-p", str(server.pid), "-o", str(told), "-e", f"trace={act.partition(':')[0]}"]
    strace = subprocess.Popen([*words, "-e", f"inject={act}"], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: strace.poll() is not None or (told.exists() and "(" in told.read_text()))
        if strace.poll() is not None:
            absent("strace", f"strace cannot act on another process here: {strace.stderr.read()[-200:]}")
        yield
    finally:
        strace.terminate()
        strace.communicate()
        now.record["injected"] = sum(told.read_text().count(word) for word in ("(DELAYED)", "(INJECTED)"))


@pytest.mark.parametrize("way", WAYS)
def test_a_disk_of_the_job_store_that_is_not_well_stops_no_training(case, fleet, seed, way, monkeypatch, absent):
    fault, what, act = WAYS[way]
    with case(fault, f"{what}, for {LASTS_S:.0f} s", seed) as now:
        gang = now.gang()
        now.inject(lambda: None)
        with injected(now, fleet.server(), act, absent):
            if way == "slow":
                now.run("true", resources={"pool": "left"})
                now.took("accepted_s", time.monotonic() - now.at_s)
            else:
                refused(now, monkeypatch)
                said = until(named)
                now.took("named_s", time.monotonic() - now.at_s)
                now.record["said"] = said[:300]
            time.sleep(max(0.0, now.at_s + LASTS_S - time.monotonic()))
            steps = until(lambda: gang.steps_since(now.at_s + LASTS_S / 2))
        assert now.record["injected"], "nothing was injected"
        assert {s["epoch"] for s in steps} == {1}
        now.over()
        fleet.reconnected()
        until(lambda: now.run("true", key=f"{now.folder}", resources={"node": "left-0"}))
        now.took("accepted_again_s", time.monotonic() - now.at_s)
        now.told(gang)
        assert {now.view(t.id)["attempt"] for t in now.trainings} == {1}


def refused(now, patch):
    """One request, asked once."""
    asked_s = time.monotonic()
    with patch.context() as once, pytest.raises(FleetError) as e:
        once.setattr(transport, "MAX_TRIES", 1)
        now.run("true", key=f"{now.folder}-refused")
    now.took("refused_s", time.monotonic() - asked_s)
    now.record["refusal"] = str(e.value)[:300]


def named():
    """What doctor says of the store, "" for nothing."""
    try:
        with client.connect() as asked:
            return next(
                (f["message"] for f in asked.fleet.doctor() if f["subject"] == "store" and f["level"] == "error"), ""
            )
    except PolyfleetError:
        return ""


def test_a_full_storage_is_named_and_its_training_goes_on_once_there_is_space(case, fleet, seed):
    if fleet.storage is None:
        pytest.skip("no file system can be mounted here")
    with case("F16", "the disk of a pool's checkpoints is full for 10 s", seed) as now:
        again = {"on_events": {"storage": "retry"}, "backoff": "1s"}
        full = now.train(resources={"pool": "right"}, recovery=again)
        other = now.train(resources={"pool": "left"})
        now.works()
        fills = fleet.storage / "fills"
        try:
            now.inject(lambda: fill(fills))
            now.record["injected"] = 1
            said = until(lambda: [a for a in now.view(full.id)["attempts"] if "is full" in a["reason"]])
            now.took("named_s", time.monotonic() - now.at_s)
            assert str(fleet.storage) in said[0]["reason"]
            time.sleep(max(0.0, 10 - now.record["named_s"]))
        finally:
            fills.unlink()
        now.over()
        now.goes_on(full, newer=False)
        until(lambda: full.lines("saved")[-1]["at_s"] > now.at_s)
        assert other.epoch == 1 and other.steps_since(now.at_s)


def fill(file):
    with file.open("wb") as f:
        try:
            while True:
                f.write(b"x" * 65536)
        except OSError:
            pass
