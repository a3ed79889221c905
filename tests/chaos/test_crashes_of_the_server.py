"""The server ends, as by kill -9, at each named point of its life; the next one brings all jobs to the same end."""

import threading
import time
from contextlib import contextmanager, suppress

import fleet_processes
import pytest
from faults import until

from cluster.errors import FleetError
from orchestrator import client
from orchestrator.core import points
from orchestrator.server import daemon

IN_CI = {"event:placed:before", "event:placed:after", "command:Launch:after", "event:finished:before"}
WITH_TRAINING = ("checkpoint", "resumed", "StoreReport")
ELSEWHERE = {
    "submitted": "threads of requests write it: tests/orchestrator/store/test_crash.py",
    "refused": "the last possible pool of a job has to leave the fleet",
    "overtaken": "an older backup has to be restored: test_job_stores.py",
    "RestartAgent": "an agent has to hang: test_frozen_processes.py",
    "DropAgent": "a node has to leave: test_killed_processes.py",
    "Refuse": "answers a wrong request, and nothing is stored",
    "Warn": "writes a line of the log",
}
"""What a short life of jobs does not come to, and why."""
POINTS = [name for name in points.names() if name.split(":")[1] not in ELSEWHERE]
FAILS_ONCE = "test -e {0}/failed || {{ touch {0}/failed; exit 1; }}"


class Keeper:
    """Starts a server whenever there is none, as an init system does. `deaths` are how long each time took."""

    def __init__(self, home):
        self._home, self._over, self.deaths = home, threading.Event(), []
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def _keep(self):
        while not self._over.wait(0.05):
            if daemon.find(self._home) is None:
                ended_s = time.monotonic()
                daemon.start(self._home)
                self.deaths.append(time.monotonic() - ended_s)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


@contextmanager
def crashing_at(point, home, patch):
    """A server that ends there, and a keeper that starts another one."""
    daemon.stop_server(home)
    with patch.context() as crashing:
        crashing.setenv("POLYFLEET_CRASH_AT", point)
        with suppress(FleetError):  # it may come to the point before it answers
            daemon.start(home)
    with Keeper(home) as keeper:
        yield keeper


@pytest.mark.parametrize("point", [p if p in IN_CI else pytest.param(p, marks=pytest.mark.chaos) for p in POINTS])
def test_a_crash_at_a_named_point_changes_no_ending(case, fleet, seed, point, monkeypatch):
    with case("F4", "the server ends at a named point of its life", seed, point) as now:
        runs = now.run(f"while [ ! -e {now.end} ]; do sleep 0.1; done", resources={"node": "left-0"})
        until(lambda: now.view(runs)["state"] == "RUNNING")
        with crashing_at(point, fleet.home, monkeypatch) as keeper:
            until(fleet.reconnected)
            short_life(now, fleet)
            if point.split(":")[1] in WITH_TRAINING:
                a_training_that_loses_its_rank(now, fleet)
            until(lambda: keeper.deaths, 30)
        now.took("back_s", keeper.deaths[0])
        assert len(keeper.deaths) == 1
        now.at_s = time.monotonic()
        assert (now.view(runs)["epoch"], now.view(runs)["state"]) == (2, "RUNNING")  # it was asked to move


def short_life(now, fleet):
    """A job of each way to end, one that moves, a node that is drained: whoever asks asks again until answered."""
    resources = {"pool": "left"}
    [held] = now.expected
    ok = now.run("true", resources=resources, key=f"{now.folder}-1")
    now.run("exit 3", "FAILED", resources=resources, key=f"{now.folder}-2")
    again = {"max_restarts": 1, "backoff": "0.1s"}
    now.run(FAILS_ONCE.format(now.folder), resources=resources, recovery=again, key=f"{now.folder}-3")
    cancelled = now.run("sleep 300", "CANCELLED", resources=resources, key=f"{now.folder}-4")
    until(lambda: now.view(cancelled)["state"] == "RUNNING")
    until(lambda: fleet.o.cancel(cancelled))
    with client.connect() as asked:
        until(lambda: asked.node_drain("left-1", True, "chaos"))
        until(lambda: asked.node_resume("left-1"))
        until(lambda: now.view(held)["epoch"] > 1 or asked.migrate(held, "right"))
    until(lambda: now.view(ok)["state"] == "SUCCEEDED")
    until(lambda: (now.view(held)["epoch"], now.view(held)["state"]) == (2, "RUNNING"))


def a_training_that_loses_its_rank(now, fleet):
    training = now.train(resources={"pool": "left"})
    until(lambda: training.lines("saved"))
    [rank] = until(lambda: fleet_processes.ranks(training.id, fleet.home))
    rank.kill()
    until(lambda: len(training.lines("start")) > 1)
