"""Ranks, agents, raylets and the server are killed while jobs run."""

import time
from contextlib import suppress

import fleet_processes
import psutil
import pytest
from faults import EVENTS, some_or_all, until

from orchestrator import Orchestrator
from orchestrator.home import daemon

pytestmark = pytest.mark.full

KILLED = [("rank", "left-1"), ("rank", "left-0"), ("agent", "left-0"), ("agent", "right-0")]
TOLD = {
    ("rank", "left-1"): ("F1", "kill -9 of the rank on node 1 of a gang"),
    ("rank", "left-0"): ("F1", "kill -9 of the rank on node 0 of a gang"),
    ("agent", "left-0"): ("F2", "kill -9 of the agent of a gang"),
    ("agent", "right-0"): ("F2", "kill -9 of the agent of one training"),
}


@pytest.mark.parametrize("killed", some_or_all(KILLED[:1] + KILLED[2:3], KILLED))
def test_a_gang_outlives_its_ranks_and_its_agents(case, fleet, seed, killed):
    """A rank that is killed costs the whole gang one interruption, an agent nothing."""
    with case(*TOLD[killed[0]], seed) as now:
        gang = now.gang()
        for number, (what, node) in enumerate(killed):
            if number:
                now.fault(*TOLD[what, node])
            until(lambda: gang.lines("saved")[-1]["epoch"] == gang.epoch)
            (kill_rank if what == "rank" else kill_agent)(now, gang, node)
        assert now.view(gang.id)["interruptions"] == sum(what == "rank" for what, _ in killed)


def kill_agent(now, gang, node):
    agent, epochs = now.fleet.agent(node), [now.view(t.id)["attempt"] for t in now.trainings]
    now.inject(agent.kill)
    until(lambda: now.fleet.agent(node).pid != agent.pid)
    now.told(gang if node == "left-0" else now.trainings[1], since_s=time.monotonic())
    assert [now.view(t.id)["attempt"] for t in now.trainings] == epochs


def kill_rank(now, gang, node):
    [rank] = fleet_processes.ranks(gang.id, now.fleet.home, node)
    now.inject(rank.kill)
    now.goes_on(gang)
    assert now.view(gang.id)["restarts"] == 0
    assert len(fleet_processes.ranks(gang.id, now.fleet.home)) == 2


@pytest.mark.chaos
def test_a_gang_that_loses_one_of_its_nodes_goes_on_once_it_has_as_many_again(case, fleet, seed, monkeypatch):
    """Its survivor fails with a broken connection long before the loss is certain: that is not what is told. Until as
    many nodes are up again it waits: how long is counted from then.
    """
    what = "kill -9 of all of node 1 of a gang; the fault ends as a node is back, after 20 s or more"
    with case("F3", what, seed) as now:
        gang = now.gang()
        monkeypatch.setenv("POLYFLEET_REPAIR", "off")
        fleet.restarted()
        now.inject(lambda: kill_node(fleet, "left-1"))
        until(lambda: now.view(gang.id)["state"] == "RECOVERING")
        now.took("lost_s", time.monotonic() - now.at_s)
        time.sleep(max(0.0, 20 - now.record["lost_s"]))
        Orchestrator.up(fleet.file).close()
        until(lambda: {n["state"] for n in fleet.o.inventory()} == {"ready"})
        now.over()
        now.goes_on(gang)
        view = now.view(gang.id)
        assert (view["interruptions"], view["restarts"]) == (1, 0), view["attempts"]
        assert "left-1" in view["attempts"][0]["reason"] and view["attempts"][0]["outcome"] == "lost", view["attempts"]
        assert now.view(now.trainings[1].id)["attempt"] == 1
        monkeypatch.delenv("POLYFLEET_REPAIR")
        fleet.restarted()


def kill_node(fleet, node):
    for process in fleet_processes.machine(fleet.home, node):
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.chaos
@pytest.mark.parametrize("kept", [True, False], ids=["adopted", "elsewhere"])
def test_a_killed_raylet_costs_no_work_where_it_is_back_in_time_and_moves_it_else(case, fleet, seed, kept, monkeypatch):
    what = "it is started again, leases of 60 s" if kept else "it stays away"
    with case("F3", f"kill -9 of a raylet; {what}", seed) as now:
        alone = now.single(recovery={"lease": "60s", "on_disconnect": "wait"} if kept else {})
        if not kept:
            monkeypatch.setenv("POLYFLEET_REPAIR", "off")
            fleet.restarted()
        agent = fleet.agent("right-0")
        now.inject(fleet_processes.raylet("right-0").kill)
        if kept:
            until(lambda: fleet_processes.ended(agent))  # it tells for as long as it lives
            now.told(alone, since_s=time.monotonic())
        else:
            now.goes_on(alone)
            assert now.view(alone.id)["attempts"][-1]["pool"] == "left"
            monkeypatch.delenv("POLYFLEET_REPAIR")
        now.end.touch()
        fleet.whole()
        assert now.view(alone.id)["attempt"] == (1 if kept else 2)


@pytest.mark.chaos
def test_a_server_that_is_killed_is_back_within_seconds_whatever_its_history(case, fleet, seed):
    with case("F4", "kill -9 of the server", seed) as now:
        if fleet.history:
            jobs, events = fleet.history, fleet.history * EVENTS
            now.record["what"] += f"; {jobs:,} jobs and {events:,} events are in its store"
        gang = now.gang()
        server = fleet.server()
        now.inject(server.kill)
        until(lambda: fleet_processes.ended(server))
        daemon.start_server(fleet.home)  # as an init system does
        fleet.reconnected().jobs.list()
        now.took("back_s", time.monotonic() - now.at_s)
        now.told(gang)
        now.run("true", resources={"node": "left-0"})
        assert {now.view(t.id)["attempt"] for t in now.trainings} == {1}
