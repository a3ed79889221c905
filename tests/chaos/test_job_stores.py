"""The job store is locked by another program, is damaged, goes back to an older backup, or is restarted, while jobs
run.
"""

import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import fleet_processes
import pytest
from faults import case, until

from cluster.errors import FleetError
from orchestrator.client import transport
from orchestrator.home import daemon

pytestmark = pytest.mark.chaos
LOCKED_S = 15.0


def polyfleet(*words, fails=False):
    done = subprocess.run(
        [Path(sys.executable).with_name("polyfleet"), *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) is fails, (done.stdout, done.stderr)
    return done


def test_a_store_that_is_locked_refuses_within_seconds_and_training_goes_on(case, fleet, seed, monkeypatch):
    with case("F22", f"another program locks the database for {LOCKED_S:.0f} s", seed) as now:
        gang = now.gang()
        with closing(sqlite3.connect(fleet.home / "polyfleet.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            now.inject(lambda: None)
            with monkeypatch.context() as once, pytest.raises(FleetError) as e:
                once.setattr(transport, "MAX_TRIES", 1)  # else the client asks again and again for half a minute
                now.run("true")
            now.took("refused_s", time.monotonic() - now.at_s)
            now.record["refusal"] = str(e.value)[:300]
            assert "is locked by another program" in str(e.value)
            time.sleep(max(0.0, LOCKED_S - now.record["refused_s"]))
            steps = until(lambda: gang.steps_since(now.at_s + LOCKED_S / 2))
            assert {s["epoch"] for s in steps} == {1}
            other.execute("ROLLBACK")
        now.over()
        now.told(gang)
        now.run("true", resources={"node": "left-0"})
        assert {now.view(t.id)["attempt"] for t in now.trainings} == {1}


def test_a_damaged_store_stops_the_server_which_says_the_way_back(case, fleet, seed, tmp_path):
    with case("F22", "the database's file is overwritten with noise; a backup is restored", seed) as now:
        gang = now.gang()
        saved, file = tmp_path / "saved.db", fleet.home / "polyfleet.db"
        polyfleet("server", "backup", str(saved))
        polyfleet("server", "stop")
        now.inject(lambda: file.write_bytes(now.random.randbytes(1 << 16) + file.read_bytes()[1 << 16 :]))
        said = polyfleet("jobs", fails=True).stderr
        now.took("told_s", time.monotonic() - now.at_s)
        now.record["said"] = said[:300]
        assert "polyfleet server restore" in said, said
        assert daemon.find_server(fleet.home) is None
        polyfleet("server", "restore", str(saved))
        now.over()
        fleet.reconnected()
        now.told(gang)


def test_an_older_backup_uses_no_epoch_again(case, fleet, seed, tmp_path):
    """The backup knows of the first attempt; two newer ones have been by the time it is restored."""
    with case("F22", "an older backup is restored while a newer attempt runs", seed) as now:
        training = now.train(resources={"pool": "right"}, recovery={"backoff": "0.1s"})
        now.works()
        saved = tmp_path / "saved.db"
        polyfleet("server", "backup", str(saved))
        for epoch in (2, 3):
            fleet_processes.ranks(training.id, fleet.home)[0].kill()
            until(lambda epoch=epoch: training.epoch == epoch)
        until(lambda: now.view(training.id)["state"] == "RUNNING" and training.lines("saved")[-1]["epoch"] == 3)
        polyfleet("server", "stop")
        polyfleet("server", "restore", str(saved))
        now.inject(fleet.reconnected)
        now.goes_on(training)
        assert training.epoch == 4
        assert 4 in [attempt["attempt"] for attempt in now.view(training.id)["attempts"]]


def test_a_postgresql_that_is_restarted_under_a_fleet(tmp_path, seed, own_fleet, postgresql, monkeypatch):
    monkeypatch.setenv("POLYFLEET_DATABASE_URL", postgresql.url())
    fleet = own_fleet()
    with case(fleet, tmp_path, "F22", "PostgreSQL is restarted (immediate), 3 s away", seed) as now:
        gang = now.gang()
        server = fleet.server()
        now.inject(postgresql.stop)
        time.sleep(3)
        postgresql.start()
        now.over()
        now.told(gang)
        now.run("true", resources={"node": "left-0"})
        assert fleet.server().pid == server.pid
        assert {now.view(t.id)["attempt"] for t in now.trainings} == {1}
