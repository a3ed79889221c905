"""Ranks, agents, raylets and the server are killed while jobs run."""

import time

import fleet_processes
import pytest
from faults import until


def chosen(values, in_ci):
    """All of them; those that are not `in_ci` only where asked for."""
    return [v if v in in_ci else pytest.param(v, marks=pytest.mark.chaos) for v in values]


@pytest.mark.parametrize("node", chosen(["left-0", "left-1"], {"left-1"}))
def test_a_gang_that_loses_a_rank_goes_on_as_a_whole(case, fleet, seed, node):
    with case("F1", f"kill -9 of the rank on node {node[-1]} of a gang", seed) as now:
        gang = now.gang()
        [rank] = fleet_processes.ranks(gang.id, fleet.home, node)
        now.inject(rank.kill)
        now.goes_on(gang)
        view = now.view(gang.id)
        assert (view["interruptions"], view["restarts"]) == (1, 0)
        assert len(fleet_processes.ranks(gang.id, fleet.home)) == 2


@pytest.mark.parametrize("node", chosen(["left-0", "right-0"], {"left-0"}))
def test_a_killed_agent_finds_what_it_had_started(case, fleet, seed, node):
    with case("F2", f"kill -9 of the agent of {'a gang' if node == 'left-0' else 'one training'}", seed) as now:
        gang = now.gang()
        other = now.trainings[1]
        agent = fleet.agent(node)
        now.inject(agent.kill)
        now.told(gang if node == "left-0" else other)
        assert fleet.agent(node).pid != agent.pid
        assert [now.view(t.id)["epoch"] for t in now.trainings] == [1, 1]


@pytest.mark.chaos
@pytest.mark.parametrize("kept", [True, False], ids=["adopted", "elsewhere"])
def test_a_killed_raylet_costs_no_work_where_it_is_back_in_time_and_moves_it_else(case, fleet, seed, kept, monkeypatch):
    what = "it is started again, leases of 60 s" if kept else "it stays away"
    monkeypatch.setenv("POLYFLEET_REPAIR", "on" if kept else "off")
    with case("F3", f"kill -9 of a raylet; {what}", seed) as now:
        alone = now.single(recovery={"lease": "60s", "on_disconnect": "wait"} if kept else {})
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
        assert now.view(alone.id)["epoch"] == (1 if kept else 2)
