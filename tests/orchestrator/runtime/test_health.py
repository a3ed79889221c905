"""Data in, findings out."""

from dataclasses import replace

import pytest

from cluster.types import Finding
from orchestrator.core.fleet.leaked_devices import Leak
from orchestrator.runtime.agents.ray_calls import Blocked
from orchestrator.runtime.controller.inbox import Repair
from orchestrator.runtime.health.health import ControllerHealth, HealthSnapshot, NodeHealth, StoreHealth, findings

WELL = HealthSnapshot(
    ControllerHealth(0.4, "waiting for messages"),
    StoreHealth("/home/polyfleet.db", size_bytes=1 << 20, free_bytes=10 << 30),
    nodes=(NodeHealth("cpu-0", "", True, 1.9),),
)


def said(seen):
    return [(node, finding.level, finding.subject, finding.message) for node, finding in findings(seen)]


def test_a_fleet_that_is_well_has_no_findings():
    assert findings(WELL) == []


def test_no_fleet_and_a_fleet_just_being_joined_are_nothing_wrong():
    for trouble, since_s in (("no fleet is up", 900.0), ("joining the Ray cluster at 127.0.0.1:1", 0.5)):
        own = replace(WELL.controller, trouble=trouble, trouble_s=since_s)
        assert findings(replace(WELL, controller=own)) == []


def test_a_server_whose_fleet_has_another_is_told_nothing_but_that():
    trouble = "another server has taken over the fleet; run `polyfleet server stop` to stop this one"
    own = replace(WELL.controller, trouble=trouble, trouble_s=900.0, overtaken=True)
    [(_, finding)] = findings(replace(WELL, controller=own))
    assert (finding.level, finding.message, finding.remedy) == ("error", trouble, "")


def test_a_controller_that_stands_still_is_told_with_its_age_and_what_it_does():
    stuck = replace(WELL, controller=ControllerHealth(42.0, "placing jobs"))
    assert said(stuck) == [
        ("", "error", "controller", "the controller has not finished a cycle for 42 s: placing jobs")
    ]


def test_turns_that_fail_again_and_again_are_told():
    failing = replace(WELL, controller=ControllerHealth(0.3, "placing jobs", "KeyError('x')", 17))
    assert said(failing) == [("", "error", "controller", "the last 17 cycles failed: KeyError('x')")]


def test_calls_into_ray_that_wait_are_named_with_their_age():
    holding = "Ray's head has not answered for 31 s"
    seen = replace(
        WELL,
        controller=replace(WELL.controller, holding=holding),
        blocked=(Blocked("list its nodes", 31.0), Blocked("reserve devices", 200.0)),
    )
    assert said(seen) == [
        ("", "error", "head", f"{holding}: running jobs continue, no job is started"),
        ("", "warning", "ray", "Ray has not answered: list its nodes for 31 s, reserve devices for 3 min"),
    ]
    assert "no thread is left" in said(replace(seen, exhausted=True))[1][3]


def test_lost_and_silent_nodes_are_told_starting_ones_get_their_time():
    nodes = (
        NodeHealth("a", "Ray marked the node dead", True, 60.0),
        NodeHealth("b", "", True, 11.0),
        NodeHealth("c", "", False, 11.0),
        NodeHealth("d", "", False, 61.0),
        NodeHealth("e", "", True, 1.0),
    )
    assert said(replace(WELL, nodes=nodes)) == [
        ("a", "error", "node", "lost: Ray marked the node dead"),
        ("b", "warning", "agent", "its agent has not answered for 11 s"),
        ("d", "warning", "agent", "its agent has not answered for 61 s"),
    ]


def test_who_has_to_start_a_lost_node_again_depends_on_whose_it_is():
    lost = replace(WELL, nodes=(NodeHealth("a", "dead", True, 9.0),))
    [(_, ours)], [(_, theirs)] = findings(lost), findings(replace(lost, repairing=False))
    assert "the server" in ours.remedy and "polyfleet up" in theirs.remedy


def test_a_node_that_can_have_no_agent_says_what_it_lacks_and_how_it_gets_that():
    why = "its agent cannot start: No module named 'psutil'"
    [(node, told)] = findings(replace(WELL, nodes=(NodeHealth("a", why, False, 90.0, unmade=why),)))
    assert (node, told.level, told.message) == ("a", "error", why)
    assert told.remedy.startswith("install polyfleet in the Python of that Ray node")


def test_attempts_that_the_database_does_not_know_are_an_error_that_says_how_to_go_on():
    nodes = (NodeHealth("a", "", True, 1.0, ("j.1.0",)), NodeHealth("b", "", True, 1.0, ("k.2.0", "k.2.1")))
    [(_, told)] = findings(replace(WELL, nodes=nodes, replaced=True))
    assert told == Finding(
        "error",
        "store",
        "the database of this home was replaced or emptied: 3 attempts of jobs that it does not contain are running "
        "(j.1.0 on a, k.2.0 on b, k.2.1 on b); no job is started on those nodes",
        "run `polyfleet server stop` and restore the database, or run `polyfleet down` to end these attempts",
    )
    assert "older copy" in said(replace(WELL, nodes=nodes))[0][3]


def test_the_store_tells_of_its_last_write_its_room_and_its_damaged_rows():
    store = StoreHealth(
        "/p.db", "the disk is full", 7.0, 3 << 20, 100 << 20, tuple(f"row {n}" for n in range(9)), 12, 4
    )
    told = said(replace(WELL, store=store))
    assert [level for _, level, _, _ in told] == ["error"] * 7 + ["warning", "info"]
    assert told[0][3] == "its last write failed 7 s ago: the disk is full"
    assert [t[3] for t in told[1:7]] == [f"/p.db: row {n}" for n in range(5)] + ["/p.db: 7 more damaged rows"]
    assert told[7][3] == "100 MiB are free on the disk of /p.db, which takes 3 MiB"
    [first, *_] = said(replace(WELL, store=replace(store, error="/p.db was removed", failed_s=0.0)))
    assert first == ("", "error", "store", "it cannot be written: /p.db was removed")


def test_leaks_repairs_and_nodes_that_end_again_are_told():
    seen = replace(
        WELL,
        leaks=(Leak("j.1", "it is reserved in Ray, and this database has no such job"),),
        repairs=(Repair("2026-11-20T12:00:00.000+00:00", "b", "node b had ended and was started again"),),
        not_repaired=("node a ended again after 3 restarts",),
    )
    assert said(seen) == [
        ("", "warning", "allocation", "j.1: it is reserved in Ray, and this database has no such job"),
        ("", "warning", "repair", "node a ended again after 3 restarts"),
        ("b", "info", "repair", "node b had ended and was started again at 2026-11-20 12:00:00 UTC"),
    ]


AGAIN = "nothing to do: it is restarted once it is idle"


@pytest.mark.parametrize(("repairing", "remedy"), [(True, AGAIN), (False, "restart that Ray node")])
def test_a_node_of_which_ray_has_lost_count_is_told_with_what_becomes_of_it(repairing, remedy):
    seen = replace(WELL, leaks=(Leak("Ray", "resources of the node have been ...", "a"),), repairing=repairing)
    [(node, finding)] = findings(seen)
    assert (node, finding.level, finding.remedy) == ("a", "warning", remedy)
