"""Waiting jobs that nothing could ever run: refused where their user wants them to stop; others say what they lack."""

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.messages import Now
from orchestrator.core.model import Recovery
from orchestrator.core.step.control import control_from_log
from orchestrator.core.step.placement import NODE_RETURN_S
from orchestrator.core.timing import REJOIN_GRACE_S

STOPS = Recovery(on_disconnect="stop")
BOTH = frozenset({"a", "v"})


@pytest.fixture
def two(c):
    """A fleet of node a, and of node v in a pool of its own."""
    c.node("a")
    c.node("v", kind="tpu:v5e")
    return c


def leaves(c, *names):
    """Ray lists the others only."""
    there = [n for n in c.control.nodes.values() if n.name not in names and not n.lost_reason]
    return c.tell(m.NodesListed(tuple(m.ListedNode(n.ray_id, n.name) for n in there)))


def waits_for_v(c, w, **more):
    """Job j waits for node v, which is drained."""
    c.tell(m.DrainRequested("v"))
    c.submit(w.job("j", w.want("tpu:v5e"), **more))
    assert c.tick()[0] == []


def test_a_job_that_is_to_stop_is_refused_minutes_after_its_last_possible_node_was_lost(two, w):
    waits_for_v(two, w, recovery=STOPS)
    leaves(two, "v")
    assert two.hear_all("a", seconds=NODE_RETURN_S - 10)[0] == [], "it may come back"
    assert two.hear_all("a", seconds=20)[0] == [("j", "refused", 0)]


def test_the_sentence_of_a_refusal_names_the_node_that_did_not_come_back(two, w):
    waits_for_v(two, w, recovery=STOPS)
    leaves(two, "v")
    while not two.events:
        two.hear_all("a", seconds=2)
    [event] = two.events
    assert event.data["reason"] == (
        "no pool has tpu:v5e; kinds here: cpu; v could run it, but was lost more than 5 minutes ago; "
        "recovery.on_disconnect is stop"
    )


def test_a_node_that_comes_back_in_time_keeps_its_job(two, w, t):
    waits_for_v(two, w, recovery=STOPS)
    leaves(two, "v")
    two.hear_all("a", seconds=NODE_RETURN_S - 10)
    two.tell(m.NodesListed((m.ListedNode("ray-a", "a"), m.ListedNode("ray-v2", "v"))))
    assert two.hear_all("a", seconds=20)[0] == [], "it has not told yet what it has"
    two.tell(m.AgentStarted("v", "ray-v2"))
    two.hear("v", facts=t.facts("v", 1, "tpu:v5e", "tpu"), ray_id="ray-v2")
    two.hear("v", ray_id="ray-v2")
    two.tell(m.ResumeRequested("v"))
    assert two.tick()[0] == [("j", "placed", 1)]


def test_a_node_that_was_lost_before_it_told_what_it_has_may_come_back_too(c, w):
    c.node("a")
    c.tell(m.NodesListed((m.ListedNode("ray-a", "a"), m.ListedNode("ray-v", "v"))))
    leaves(c, "v")
    c.submit(w.job("j", w.want("tpu:v5e"), recovery=STOPS))
    assert c.hear_all("a", seconds=NODE_RETURN_S - 10)[0] == []
    assert c.hear_all("a", seconds=20)[0] == [("j", "refused", 0)]


def test_the_last_node_of_a_fleet_that_does_not_come_back_ends_what_waits_for_it(c, w):
    c.node("v", kind="tpu:v5e")
    waits_for_v(c, w, recovery=STOPS)
    leaves(c, "v")
    assert c.tick(NODE_RETURN_S - 10)[0] == []
    assert c.tick(20.0)[0] == [("j", "refused", 0)]


def test_a_pool_that_the_next_cluster_does_not_have_ends_what_waits_for_it_once_all_have_told(two, w):
    waits_for_v(two, w, recovery=STOPS)
    two.tell(m.ClusterLeft(has_ended=True))
    assert two.tick(600.0, problem="no fleet is up")[0] == []
    two.tell(m.ClusterJoined())
    assert two.tick(2.0, expected=BOTH)[0] == [], "nobody has told anything"
    two.node("a")
    assert two.tick(2.0, expected=BOTH)[0] == [], "the fleet's record expects node v"
    assert two.tick(2.0, expected=frozenset({"a"}))[0] == [("j", "refused", 0)]


def test_nodes_of_the_fleets_record_that_are_started_again_with_the_server_are_waited_for(two, w):
    """All of it had ended, and its nodes are started one after the other."""
    waits_for_v(two, w, recovery=STOPS)
    two.control = control_from_log(two.control.records.values(), {}, lambda job, epoch: 0, Now(two.s, two.wall_s))
    two.tell(m.ClusterJoined())
    two.node("a")
    assert two.tick(NODE_RETURN_S - 10, recorded=BOTH)[0] == []
    assert two.tick(20.0, recorded=BOTH)[0] == [("j", "refused", 0)]


def test_a_pool_that_is_added_later_is_waited_for_while_it_starts(c, w):
    c.node("a")
    c.tick(2 * NODE_RETURN_S)
    c.submit(w.job("j", w.want("tpu:v5e"), recovery=STOPS))
    assert c.tick(NODE_RETURN_S, recorded=BOTH, expected=BOTH)[0] == []


def test_a_time_without_a_cluster_is_none_in_which_a_node_could_have_come_back(two, w):
    waits_for_v(two, w, recovery=STOPS)
    leaves(two, "v")
    two.hear_all("a", seconds=20)
    two.tell(m.ClusterLeft())
    two.tick(2 * NODE_RETURN_S, problem="Ray's head does not answer")
    two.tell(m.ClusterJoined())
    two.tell(m.AgentStarted("a", "ray-a"))
    assert two.hear_all("a", seconds=NODE_RETURN_S)[0] == []
    assert two.hear_all("a", seconds=REJOIN_GRACE_S + 4)[0] == [("j", "refused", 0)]


def test_a_time_in_which_the_server_was_stopped_is_none_in_which_a_node_could_have_come_back(two, w):
    waits_for_v(two, w, recovery=STOPS)
    leaves(two, "v")
    assert two.tell(m.Tick(), 2 * NODE_RETURN_S)[0] == []
    assert two.hear_all("a", seconds=NODE_RETURN_S - 10)[0] == []
    assert two.hear_all("a", seconds=20)[0] == [("j", "refused", 0)]


def test_a_job_that_stays_with_its_vendor_is_refused_once_that_has_left(two, w, t):
    recovery = Recovery(on_disconnect="stop", cross_vendor=False)
    two.run(w.job("j", w.want("tpu:v5e"), w.want("cpu"), ordered=True, recovery=recovery))
    two.tell(m.DrainRequested("v", now=True))
    two.hear("v", t.ended("j", 1, 0, "preempted"))
    leaves(two, "v")
    assert two.hear_all("a", seconds=NODE_RETURN_S - 10)[0] == []
    events, _ = two.hear_all("a", seconds=20)
    assert events == [("j", "refused", 1)]


def test_what_waits_for_a_lost_node_names_it_and_later_what_it_lacks(two, w):
    waits_for_v(two, w)
    leaves(two, "v")
    two.hear_all("a", seconds=4)
    lost = "node v is lost: Ray marked the node dead"
    assert two.control.plan.why_not["j"] == {
        (0, "a/cpu"): "is of kind cpu, but the job accepts tpu:v5e",
        (0, "v/tpu:v5e"): lost,
    }
    assert two.hear_all("a", seconds=3700)[0] == [], "it waits without end"
    assert two.control.plan.why_not["j"] == {(0, "a/cpu"): "is of kind cpu, but the job accepts tpu:v5e"}


def test_what_waits_in_a_fleet_without_any_node_says_so(c, w):
    c.node("a")
    c.submit(w.job("j", w.want("tpu:v5e")))
    c.tell(m.ClusterLeft(has_ended=True))
    c.tell(m.ClusterJoined())
    c.tick(3.0)
    assert c.control.plan.why_not["j"] == {(0, ""): "no node has reported its devices yet"}
