"""The head of a fleet is away for minutes: what runs goes on, what is new waits, and then all is as before."""

import time
from contextlib import suppress

import fleet_processes
import psutil
import pytest
from faults import until

from cluster.fleet import fleet_record
from cluster.host.processes import with_descendants
from orchestrator import Orchestrator

pytestmark = pytest.mark.chaos
COUNTS = "i=0; while [ ! -e {end} ]; do i=$((i + 1)); echo $i; sleep 1; done"
SHORT_LEASE = {"lease": "10s"}


@pytest.mark.parametrize("outage_s", [5.0, 65.0, 300.0])
def test_a_frozen_state_server(case, fleet, seed, outage_s):
    with case("F5", f"the head's state server is frozen for {outage_s:.0f} s", seed) as now:
        running = work(now)
        frozen = fleet_processes.state_server()
        try:
            waiting = away(now, running, outage_s, frozen.suspend)
        finally:
            now.over()
            frozen.resume()
        back(now, outage_s, running, waiting)


@pytest.mark.parametrize("outage_s", [65.0])
def test_a_killed_head(case, fleet, seed, outage_s, monkeypatch):
    """The server is told to leave it away. It is started again by `polyfleet up`, on its own storage."""
    with case("F6", f"all of the head is away for {outage_s:.0f} s", seed) as now:
        monkeypatch.setenv("POLYFLEET_REPAIR", "off")
        fleet.restarted()
        running = work(now)
        waiting = away(now, running, outage_s, kill_head)
        now.over()
        Orchestrator.up(fleet.file).close()
        back(now, outage_s, running, waiting)
        monkeypatch.delenv("POLYFLEET_REPAIR")
        fleet.restarted()


def kill_head():
    record = fleet_record.read()
    for process in with_descendants([record.head.process]):
        with suppress(psutil.NoSuchProcess):  # processes of Ray end as their parent does
            process.kill()


def work(now):
    """A training and a command, which are to live on with leases far shorter than most outages. The training seldom
    saves: minutes of it are not to slow down what the campaign measures meanwhile.
    """
    training = now.train({"save_every": 50}, resources={"pool": "right"}, recovery=SHORT_LEASE)
    counts = now.run(COUNTS.format(end=now.end), resources={"node": "left-0"}, recovery=SHORT_LEASE)
    until(lambda: now.view(counts)["state"] == "RUNNING")
    now.works()
    return training, counts


def away(now, running, outage_s, begin):
    """From when the head goes until it is to come back. Returns a job that was submitted meanwhile, which waits."""
    training, counts = running
    now.inject(begin)
    waiting = now.run("true", resources={"node": "left-1"})
    if outage_s > 10:
        until(lambda: "head" in now.view(waiting)["reason"])
    while time.monotonic() < now.at_s + outage_s:
        assert {(now.view(job)["state"], now.view(job)["attempt"]) for job in (training.id, counts)} == {("RUNNING", 1)}
        time.sleep(1)
    assert training.steps_since(now.at_s + outage_s / 2), "the training stood still"
    return waiting


def back(now, outage_s, running, waiting):
    """The job that waited ends; what ran has gone on in its first attempt, and every line it wrote is there once."""
    training, counts = running
    until(lambda: now.view(waiting)["state"] == "SUCCEEDED")
    now.took("ended_s", time.monotonic() - now.at_s)
    now.told(training, since_s=time.monotonic())
    now.end.touch()
    for job in (training.id, counts):
        view = until(lambda job=job: now.view(job)["state"] == "SUCCEEDED" and now.view(job))
        assert (view["attempt"], view["interruptions"]) == (1, 0), view["attempts"]
    numbers = str(now.fleet.o.job(counts).logs()).split()
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)] and len(numbers) > outage_s / 2
