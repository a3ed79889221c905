"""How attempts end: the first cause decides, whoever tells first."""

from dataclasses import replace

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Fence, Release, RemoveFiles, Stop
from orchestrator.core.model import Recovery

LEASE = ("lost", "lost", "its lease expired: neither the server nor a fence could be reached", {0: -9})


def test_a_job_that_is_to_stop_when_it_is_cut_off_stops_with_its_lease_and_says_so(c, w, t):
    c.node("a")
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(on_disconnect="stop", retry_exit_codes=(-9,))))
    assert c.hear("a", t.ended("j", 1, 0, *LEASE))[0] == [("j", "failed", 1)]
    assert c.events[0].data["reason"] == f"{LEASE[2]}; recovery.on_disconnect is stop"


def test_exit_codes_of_ranks_that_ended_with_a_lease_are_not_those_of_the_job(c, w, t):
    c.node("a")
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(retry_exit_codes=(-9,))))
    c.hear("a", t.ended("j", 1, 0, *LEASE))
    assert c.control.records["j"].reason == LEASE[2]


def test_a_job_that_succeeds_is_finished_forgotten_and_gives_its_devices_back(c, w, t):
    c.node("a")
    launch = c.run(w.job("j", w.want("cpu")))
    assert c.hear("a", t.ended("j", 1, codes={0: 0})) == ([("j", "finished", 1)], [RemoveFiles("a", "j", 1)])
    assert c.tick() == ([], [Release(launch.reservation_name)])
    assert c.tell(m.ReleaseAnswered(launch.reservation_name)) == ([], [])
    assert not c.control.records and not c.control.attempts and not c.control.pending_releases


@pytest.mark.parametrize(
    ("outcome", "events"),
    [
        (("failed", "user", "exit code 3", {0: 3}), ["started", "failed"]),
        (("failed", "start", "no such program", {}), ["failed"]),
    ],
)
def test_a_job_that_ended_before_anybody_saw_it_run_has_started_if_its_ranks_did(c, w, t, outcome, events):
    c.node("a")
    launch = c.place(w.job("j", w.want("cpu")))
    c.tell(m.Launched("j", launch.epoch))
    assert [event for _, event, _ in c.hear("a", t.ended("j", 1, 0, *outcome))[0]] == events


def test_a_sister_whose_connection_broke_does_not_hide_the_node_that_was_lost(gang, t):
    """The survivor's failure is told at once, the loss of the other node only after its lease."""
    broken = t.ended("g", 1, 1, "failed", "user", "connection closed by peer", {1: 1}, "b")
    assert gang.hear("b", broken, after_s=1.0) == ([], [Stop("a", "g", 1, "cancel")])
    events, commands = gang.hear_all("b", seconds=10)
    assert (events, {x for x in commands if isinstance(x, Fence)}) == ([], {Fence("g", 2)})
    gang.tell(m.FenceAnswered("g", 2, current_epoch=2))
    events, commands = gang.hear_all("b", seconds=14)
    assert events == [("g", "interrupted", 1)]
    record = gang.control.records["g"]
    assert record.attempts[-1].outcome == "lost"
    assert record.failure["kind"] == "lost" and record.failure["node"] == "a"
    assert record.reason.startswith("node a has not answered for "), "not rank 0, and not its own code"
    assert record.job.avoid == ("a",)


def test_a_sister_killed_from_outside_does_not_hide_the_node_that_was_lost(gang, t):
    gang.hear("b", t.ended("g", 1, 1, "failed", "signal", "killed", {1: -9}, "b"))
    told = t.ended("g", 1, 0, "lost", "lost", "the attempt's supervisor is gone", {}, "a")
    assert gang.hear("a", told)[0] == [("g", "interrupted", 1)]
    assert gang.control.records["g"].job.interruptions == 1


def test_the_loss_that_a_node_tells_itself_decides_however_late_it_is_told(gang, t):
    broken = t.ended("g", 1, 1, "failed", "user", "connection closed by peer", {1: 1}, "b")
    gang.hear("b", broken)
    told = t.ended("g", 1, 0, "lost", "lost", "the attempt's supervisor is gone", {}, "a")
    assert gang.hear("a", told, after_s=5.0)[0] == [("g", "interrupted", 1)]
    assert gang.control.records["g"].reason == "node a (node rank 0): the attempt's supervisor is gone"


def test_a_failure_of_the_jobs_own_code_decides_when_its_sister_was_still_heard_later(gang, t):
    gang.hear("b", t.ended("g", 1, 1, "failed", "user", "ValueError: 7", {1: 1}, "b"))
    gang.hear("a", after_s=4.0)
    gang.tick()
    events, _ = gang.hear_all("b", seconds=8)
    gang.tell(m.FenceAnswered("g", 2, current_epoch=2))
    events, _ = gang.hear_all("b", seconds=16)
    assert events == [("g", "failed", 1)]
    assert gang.state("g") == "", "it has ended"


def test_a_part_that_read_its_fence_was_lost_also_for_a_server_that_did_not_raise_it(gang, t):
    """Its fence was raised by a server before this one, and this one remembers nothing of that."""
    gang.hear("a", t.ended("g", 1, 0, "fenced", codes={0: -9}))
    gang.hear("b", t.ended("g", 1, 1, "failed", "user", "connection closed by peer", {1: 1}, "b"))
    assert [e.event for e in gang.events] == ["interrupted"]
    assert gang.control.records["g"].attempts[-1].outcome == "lost"


def test_a_node_that_appears_again_and_says_nothing_was_not_heard(gang, t):
    """Its machine has joined a new cluster and its agent does not answer: that is no word of its part."""
    gang.hear("b", t.ended("g", 1, 1, "failed", "user", "connection closed by peer", {1: 1}, "b"))
    gang.tell(m.ClusterLeft(has_ended=True))
    gang.tell(m.ClusterJoined(), 5.0)
    gang.tell(m.NodesListed((m.ListedNode("ray-a2", "a"), m.ListedNode("ray-b", "b"))))
    gang.tick(10.0)
    gang.tell(m.FenceAnswered("g", 1, current_epoch=1))
    gang.tell(m.FenceAnswered("g", 2, current_epoch=2))
    assert gang.tick(14.0)[0] == [("g", "interrupted", 1)]
    assert gang.control.records["g"].attempts[-1].outcome == "lost"


def test_a_node_that_comes_back_with_an_empty_disk_was_not_heard_of_its_part(gang, t):
    """It lost its power, and its disk: what it says later is no word of the part that the other broke with."""
    gang.hear("b", t.ended("g", 1, 1, "failed", "user", "connection closed by peer", {1: 1}, "b"))
    gang.tell(m.NodesListed((m.ListedNode("ray-a2", "a"), m.ListedNode("ray-b", "b"))), 3.0)
    gang.tell(m.AgentStarted("a", "ray-a2"), 1.0)
    gang.hear("a", there=(), ray_id="ray-a2", facts=t.facts("a"), after_s=1.0)
    gang.tick()
    gang.tell(m.FenceAnswered("g", 2, current_epoch=2))
    gang.tell(m.StopAnswered("a", "g", 1, "cancel"))
    gang.hear("a", there=(), ray_id="ray-a2", after_s=1.0)
    assert gang.tick()[0][0] == ("g", "interrupted", 1)
    assert gang.control.records["g"].attempts[0].reason == "node a has no record of this attempt"


def test_a_time_in_which_the_server_itself_was_stopped_is_no_word_of_a_node(gang, t):
    """A silent node counts as heard for as long as we were stopped, but it said nothing."""
    gang.hear("b", t.ended("g", 1, 1, "failed", "user", "connection closed by peer", {1: 1}, "b"))
    gang.tick(10.0)
    gang.tell(m.FenceAnswered("g", 2, current_epoch=2))
    gang.tell(m.Tick(), 30.0)
    assert gang.tick(14.0)[0] == [("g", "interrupted", 1)]
    assert gang.control.records["g"].attempts[-1].outcome == "lost"


def test_a_node_that_comes_back_without_its_part_says_nothing_of_when_that_ended(gang, t):
    """Its machine was made anew: the answers that follow are no sign that the part lived when its sister failed."""
    gang.hear("b", t.ended("g", 1, 1, "failed", "user", "connection closed by peer", {1: 1}, "b"))
    gang.hear("a", there=(), after_s=4.0)
    assert Fence("g", 2) in gang.tick()[1]
    gang.tell(m.FenceAnswered("g", 2, current_epoch=2))
    gang.tell(m.StopAnswered("a", "g", 1, "cancel"))
    gang.hear("a", there=(), after_s=1.0)
    assert gang.tick()[0][0] == ("g", "interrupted", 1)


def test_a_part_that_its_own_fence_ended_was_lost_and_not_cancelled(gang, t):
    """Cut off, a node reads the fence and ends its part; its sister's connection breaks."""
    _, commands = gang.hear_all("b", seconds=8)
    assert Fence("g", 2) in commands
    gang.tell(m.FenceAnswered("g", 2, current_epoch=2))
    gang.hear("b", t.ended("g", 1, 1, "failed", "user", "connection closed by peer", {1: 1}, "b"))
    assert gang.hear("a", t.ended("g", 1, 0, "fenced"))[0] == [("g", "interrupted", 1)]
    reason = gang.control.records["g"].reason
    assert "node a has not answered for" in reason and "node a then ended its part" in reason


def test_what_a_node_is_told_says_whether_its_part_ends_because_of_a_failure_or_is_cut_off(gang, t):
    """It keeps that on its disk: a server that is killed before the end does not have to remember it."""
    failed = t.ended("g", 1, 1, "failed", "user", "ValueError: 7", {1: 1}, "b")
    assert gang.hear("b", failed)[1] == [Stop("a", "g", 1, "cancel")]
    assert gang.hear("a", t.ended("g", 1, 0, "cancelled"))[0] == [("g", "failed", 1)]


def test_the_sisters_of_a_part_that_was_lost_are_fenced_off(gang, t):
    told = t.ended("g", 1, 0, "lost", "lost", "the attempt's supervisor is gone", {}, "a")
    assert gang.hear("a", told)[1] == [Stop("b", "g", 1, "fence")]
    assert gang.hear("b", t.ended("g", 1, 1, "fenced"))[0] == [("g", "interrupted", 1)]
    assert gang.control.records["g"].reason == "node a (node rank 0): the attempt's supervisor is gone"


def test_what_ranks_wrote_and_nobody_can_read_stops_that_attempt_only_and_decides(gang, t):
    told = m.PartUnreadable("g", 1, 1, "events.jsonl is a folder")
    assert [x.text for x in gang.tell(told)[1]] == [
        "attempt g.1.1: node b sent an unreadable message: events.jsonl is a folder"
    ]
    assert gang.tick()[1] == [Stop("a", "g", 1, "cancel"), Stop("b", "g", 1, "cancel")]
    gang.hear("a", t.ended("g", 1, 0, "cancelled"))
    assert gang.hear("b", t.ended("g", 1, 1, "succeeded"))[0] == [("g", "failed", 1)]
    assert gang.events[0].data["failure"]["kind"] == "unreadable"


def test_a_report_that_comes_twice_or_of_a_part_that_has_ended_changes_nothing(c, w, t):
    c.node("a")
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(max_restarts=1)))
    said = t.ended("j", 1, 0, "failed", "user", "boom", {0: 1})
    assert c.hear("a", said)[0] == [("j", "interrupted", 1)]
    before = c.control.records
    assert c.hear("a", said)[0] == []
    assert c.hear("a", t.report("j", 1, 0, "running"))[0] == []
    assert c.control.records == before


def test_a_fence_that_a_server_before_us_raised_is_why_a_part_ended(gang, t):
    gang.tell(m.ClusterJoined())
    gang.tell(m.FenceAnswered("g", 1, current_epoch=2))
    gang.hear("a", t.ended("g", 1, 0, "fenced"))
    gang.hear("b", t.ended("g", 1, 1, "failed", "user", "connection closed by peer", {1: 1}, "b"))
    assert [e.event for e in gang.events] == ["interrupted"]


def lose(c, t, node, others):
    """It is silent until nothing of it can run any more."""
    c.hear_all(*others, seconds=8)
    c.tell(m.FenceAnswered("g", 2, current_epoch=2))
    for other in others:
        live = c.control.attempts["g"]
        rank = next(rank for rank, part in enumerate(live.parts) if part.node == other)
        c.hear(other, t.ended("g", 1, rank, "fenced"))
    c.hear_all(*others, seconds=14)
    failure = c.control.records["g"].failure
    assert (failure["kind"], failure["node"]) == ("lost", node)
    return failure["rank"]


@pytest.mark.parametrize(
    ("task", "how", "ranks"), [("train", "node", [0, 2, 4]), ("run", "node", [0, 1, 2]), ("run", "ranks", [0, 2, 4])]
)
def test_a_lost_part_is_told_by_its_node_and_the_first_rank_that_ran_there(c, w, t, task, how, ranks):
    """A training has a rank per device, and so has a command that asks for it; else there is one per node."""
    for name in ("a", "b", "c"):
        c.node(name, 2, "nvidia:H100")
    launch = c.run(replace(w.job("g", w.want("nvidia:H100", count=2, nodes=3, launch=how)), task=task))
    assert [order.first_rank for order in launch.orders] == ranks
    assert {(order.world_size, order.launch) for order in launch.orders} == {(ranks[1] * 3, how)}
    node = launch.nodes[1]
    assert lose(c, t, node, [other for other in launch.nodes if other != node]) == ranks[1]


@pytest.mark.parametrize(("whole", "share"), [(True, 4), (False, 16)])
def test_each_rank_of_a_gang_gets_its_share_of_a_whole_batch(c, w, whole, share):
    for name in ("a", "b"):
        c.node(name, 2, "nvidia:H100")
    want = w.want("nvidia:H100", count=2, min_count=1, nodes=2, batch_size=16, whole_batch=whole)
    launch = c.run(replace(w.job("g", want), task="train"))
    assert [(order.world_size, order.batch_size) for order in launch.orders] == [(4, share)] * 2


def test_a_part_that_was_not_started_is_told_by_its_first_rank(c, w):
    for name in ("a", "b"):
        c.node(name, 2, "nvidia:H100")
    launch = c.place(w.job("g", w.want("nvidia:H100", count=2, nodes=2)))
    c.tell(m.LaunchFailed("g", 1, "launch", "no room", lacking=(launch.nodes[1],)))
    failure = c.control.records["g"].failure
    assert (failure["node"], failure["rank"]) == (launch.nodes[1], 2)
    assert f"node {launch.nodes[1]} (node rank 1): no room" in c.control.records["g"].reason
