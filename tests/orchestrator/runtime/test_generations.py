"""Which of several servers controls a fleet: the one that was started last, whatever store each of them has."""

import shutil

import pytest

from orchestrator.runtime.controller.repair import RepairThread

TRUE = {"task": "run", "name": "j", "command": ["true"], "resources": {"pool": "cpu"}}


@pytest.fixture
def copied(servers, tmp_path):
    """Two homes with the same store, of which neither has a server."""
    start, _ = servers
    start().close()
    shutil.copytree(tmp_path / "home", tmp_path / "copy")


def obeyed(fleet):
    """The newest controller that each node knows."""
    return {actor.agent._generation.newest for actor in fleet._by_id.values()}


def ran(service, wait_for):
    job = service.submissions.submit(TRUE)["id"]
    wait_for(lambda: service.jobs_table.find(job).job.state == "SUCCEEDED")


def test_a_server_counts_itself_above_what_nodes_know_of_a_store_that_is_gone(servers, wait_for):
    start, fleet = servers
    first = start()
    fleet.wait_until_known(first)
    first.close()
    for actor in fleet._by_id.values():
        actor.agent.register(10**9)
    second = start("restored")
    fleet.wait_until_known(second)
    (generation,) = obeyed(fleet)
    assert generation == second.agents.generation > 10**9
    ran(second, wait_for)
    assert obeyed(fleet) == {generation}, "it counts no further"


def test_a_server_that_is_taken_over_does_nothing_more_and_says_why(servers, copied, wait_for):
    start, fleet = servers
    older = start()
    fleet.wait_until_known(older)
    ran(older, wait_for)
    older.runtime._repair = repair = RepairThread(lambda *_: None)
    newer = start("copy")
    wait_for(lambda: "another server, started after this one, has taken over" in older.runtime.problem)
    fleet.wait_until_known(newer)
    counted = older.agents.generation
    (generation,) = obeyed(fleet)
    assert generation == newer.agents.generation > counted
    waiting = older.submissions.submit(TRUE)["id"]
    ran(newer, wait_for)
    view = older.job_views.view(older.jobs_table.find(waiting))
    assert view["state"] == "PENDING" and "has taken over" in view["reason"]
    assert not newer.runtime.problem and obeyed(fleet) == {generation} and older.agents.generation == counted
    assert older.agents.idle_agents() == [], "it asks no node for anything"
    assert repair._closing.is_set(), "nor does it start nodes again"


def test_of_two_servers_that_start_together_one_is_left(servers, copied, wait_for):
    start, fleet = servers
    both = [start("home"), start("copy")]
    wait_for(lambda: any("has taken over" in service.runtime.problem for service in both))
    (left,) = [service for service in both if not service.agents.superseded_by]
    fleet.wait_until_known(left)
    ran(left, wait_for)
    assert obeyed(fleet) == {left.agents.generation}
