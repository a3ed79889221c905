"""Attempts that are asked to save: for a job of higher priority, for a node that goes, for a move."""

from dataclasses import replace

import pytest

from cluster.types import Notice
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.attempts import previous_attempts
from orchestrator.core.controller.commands import Launch, RemoveFiles, Stop
from orchestrator.core.controller.messages import Now
from orchestrator.core.model import Recovery
from orchestrator.core.step.control import control_from_log


@pytest.fixture
def gang(c, w):
    c.node("a")
    c.node("b")
    c.run(w.job("g", w.want("cpu", nodes=2), recovery=Recovery(grace_s=30.0)))
    return c


def test_the_first_part_that_has_saved_leaves_its_sisters_their_own_grace(gang, w, t):
    gang.submit(w.job("urgent", w.want("cpu", nodes=2), priority=9))
    assert gang.tick() == ([("g", "preempted", 1)], [Stop("a", "g", 1, "preempt"), Stop("b", "g", 1, "preempt")])
    for node in ("a", "b"):
        gang.tell(m.StopAnswered(node, "g", 1, "preempt"))
    gang.hear("a", t.ended("g", 1, 0, "preempted"))
    assert gang.hear_all("a", "b", seconds=28) == ([], []), "no cancel within the grace of 30 s"
    assert gang.hear("b", t.ended("g", 1, 1, "preempted"))[0] == [("g", "interrupted", 1)]
    events, _ = gang.tick()
    assert events == [("urgent", "placed", 1)]
    job = gang.control.records["g"].job
    assert (job.interruptions, job.restarts, job.avoid) == (1, 0, ()), "its place in line is kept, nothing is avoided"


def test_a_part_that_had_ended_before_it_was_asked_does_not_finish_a_job_whose_other_part_stopped_early(gang, t):
    gang.tell(m.DrainRequested("a", now=True))
    gang.hear("b", t.ended("g", 1, 1, "succeeded", codes={1: 0}))
    assert gang.hear("a", t.ended("g", 1, 0, "preempted", codes={0: 0}))[0] == [("g", "interrupted", 1)]
    assert gang.control.records["g"].attempts[-1].outcome == "preempted"


def test_a_part_that_does_not_heed_its_stop_is_asked_again_after_its_grace(gang, t):
    gang.tell(m.DrainRequested("a", now=True))
    for node in ("a", "b"):
        gang.tell(m.StopAnswered(node, "g", 1, "preempt"))
    gang.hear("a", t.ended("g", 1, 0, "preempted"))
    _, commands = gang.hear_all("a", "b", seconds=60)
    assert set(commands) == {Stop("b", "g", 1, "preempt")}


def test_a_failure_while_one_part_saves_has_the_other_stopped_at_once(gang, t):
    gang.tell(m.DrainRequested("a", now=True))
    told = t.ended("g", 1, 0, "failed", "storage", "the disk is full", {0: 1})
    assert gang.hear("a", told)[1] == [Stop("b", "g", 1, "cancel")]


def told_to_go(t, name, reason=""):
    """What its agent tells of the node: with a notice, or without."""
    return replace(t.facts(name), notice=Notice(reason, 25.0) if reason else None)


def test_a_notice_that_an_agent_tells_of_has_its_attempts_save_and_keeps_new_ones_away(c, w, t):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    going = told_to_go(t, "a", "its machine is shut down")
    events, commands = c.hear("a", facts=going)
    assert (events, commands) == ([("j", "preempted", 1)], [Stop("a", "j", 1, "preempt")])
    assert c.state("j") == "SAVING"
    why = "node a is about to shut down: its machine is shut down (25 s were left)"
    assert c.events[0].data["reason"] == why
    assert c.hear("a", facts=going, after_s=1.0) == ([], []), "it is told with each answer"
    c.tell(m.StopAnswered("a", "j", 1, "preempt"))
    assert c.hear("a", t.ended("j", 1, 0, "preempted"))[0] == [("j", "interrupted", 1)]
    assert c.hear_all("a", seconds=10)[0] == []
    assert c.control.plan.why_not["j"] == {(0, "a/cpu"): why}


def test_a_node_whose_notice_was_withdrawn_takes_work_again_and_what_saves_is_not_lost(c, w, t):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.hear("a", facts=told_to_go(t, "a", "its machine is shut down"))
    assert c.hear("a", facts=told_to_go(t, "a")) == ([], [])
    assert c.state("j") == "SAVING", "its ranks have been told to end"
    c.submit(w.job("next", w.want("cpu")))
    c.tell(m.StopAnswered("a", "j", 1, "preempt"))
    c.hear("a", t.ended("j", 1, 0, "preempted"))
    assert c.tick()[0] == [("j", "placed", 2)], "it keeps its place in line"
    assert c.control.records["j"].job.interruptions == 1


def test_an_attempt_that_is_being_launched_when_its_node_has_a_notice_saves_once_it_was_started(c, w, t):
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    events, commands = c.hear("a", facts=told_to_go(t, "a", "its machine is shut down"))
    assert (events, commands) == ([("j", "preempted", 1)], [])
    assert c.tell(m.Launched("j", 1))[1] == [Stop("a", "j", 1, "preempt")]


@pytest.mark.parametrize("shown", ["running", "ended"])
def test_ranks_that_ran_before_a_stop_of_a_starting_attempt_have_started(c, w, t, shown):
    """So that the next attempt continues with the files that they have written."""
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    c.tell(m.Launched("j", 1))
    assert c.tell(m.DrainRequested("a", now=True))[0] == [("node/a", "drained", 0), ("j", "preempted", 1)]
    why = c.control.records["j"].reason
    if shown == "running":
        assert c.hear("a", t.report("j", 1, 0, "running"))[0] == [("j", "started", 1)]
        assert (c.state("j"), c.control.records["j"].reason) == ("SAVING", why)
    events, _ = c.hear("a", t.ended("j", 1, 0, "preempted", codes={0: 0}))
    assert events == [("j", "started", 1)] * (shown == "ended") + [("j", "interrupted", 1)]
    assert [one.started for one in previous_attempts(c.control.records["j"].attempts)] == [True]


def test_an_attempt_that_was_stopped_before_its_ranks_ran_has_not_started(c, w, t):
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    c.tell(m.Launched("j", 1))
    c.tell(m.DrainRequested("a", now=True))
    assert c.hear("a", t.ended("j", 1, 0, "preempted"))[0] == [("j", "interrupted", 1)]
    assert [one.started for one in previous_attempts(c.control.records["j"].attempts)] == [False]


def test_a_notice_that_came_while_no_server_ran_is_acted_on_by_the_next(c, w, t):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.control = control_from_log(c.control.records.values(), {}, lambda job, epoch: 0, Now(c.s, c.wall_s))
    c.tell(m.ClusterJoined())
    c.tell(m.FenceAnswered("j", 1, current_epoch=1))
    c.tell(m.NodesListed((m.ListedNode("ray-a", "a"),)))
    c.tell(m.AgentStarted("a", "ray-a"))
    going = told_to_go(t, "a", "its machine is shut down")
    events, commands = c.hear("a", t.report("j", 1, 0, "running"), facts=going)
    assert (events, commands) == ([("j", "preempted", 1)], [Stop("a", "j", 1, "preempt")])


def test_a_move_replaces_where_the_job_may_run_and_it_saves_first(c, w, t):
    c.node("a")
    c.node("v", kind="tpu:v5e")
    c.run(w.job("j", w.want("cpu")))
    events, commands = c.tell(m.MigrateRequested("j", ("tpu:v5e",)))
    assert (events, commands) == ([("j", "migrated", 1), ("j", "preempted", 1)], [Stop("a", "j", 1, "preempt")])
    c.hear("a", t.ended("j", 1, 0, "preempted"))
    _, commands = c.tick()
    [launch] = [x for x in commands if isinstance(x, Launch)]
    assert (launch.nodes, launch.earlier_pools) == (("v",), ("cpu",))


def test_a_move_to_where_nothing_is_free_is_refused_and_the_job_runs_on(c, w):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    events, [refused] = c.tell(m.MigrateRequested("j", ("tpu:v5e",)))
    assert (events, c.state("j")) == ([], "RUNNING")
    assert refused.message == "job j cannot move to tpu:v5e now: a/cpu is of kind cpu, but the job accepts tpu:v5e"


def test_a_move_to_where_the_job_runs_is_refused_with_that_word(c, w):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    for asked in (m.MigrateRequested("j", ("cpu",)), m.MigrateRequested("j", pool="cpu")):
        events, [refused] = c.tell(asked)
        assert (events, refused.message) == ([], "job j already runs on cpu in pool cpu")


def test_a_job_that_may_not_cross_vendors_stays_with_the_one_it_last_ran_on(c, w, t):
    c.node("a")
    c.node("v", kind="tpu:v5e")
    wants = (w.want("cpu"), w.want("tpu:v5e"))
    c.submit(w.job("j", *wants, ordered=True, recovery=Recovery(cross_vendor=False)))
    c.tick()
    c.tell(m.Launched("j", 1))
    c.hear("a", t.ended("j", 1, 0, "lost", "lost", "its supervisor is gone"))
    assert c.hear_all("a", "v", seconds=4)[0] == [("j", "placed", 2)]
    assert [part.node for part in c.control.attempts["j"].parts] == ["a"]


def test_a_waiting_job_that_may_not_cross_vendors_is_not_moved_to_where_it_never_runs(c, w, t):
    c.node("a")
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(cross_vendor=False)))
    c.tell(m.DrainRequested("a", now=True))
    c.hear("a", t.ended("j", 1, 0, "preempted"))
    assert c.state("j") == "RECOVERING"
    events, [refused] = c.tell(m.MigrateRequested("j", ("tpu:v5e",)))
    assert events == []
    told = "job j cannot move to tpu:v5e: the job last ran on cpu, and recovery.cross_vendor is false"
    assert refused.message == told
    assert c.tell(m.MigrateRequested("j", ("any",)))[0] == [("j", "migrated", 1)]


def test_a_job_that_may_not_be_stopped_keeps_its_device_from_one_of_higher_priority(c, w):
    c.node("a")
    c.run(w.job("pinned", w.want("cpu"), preemptible=False))
    c.submit(w.job("urgent", w.want("cpu"), priority=5))
    assert c.tick() == ([], [])
    assert (c.state("pinned"), c.state("urgent")) == ("RUNNING", "PENDING")


def test_a_preempted_job_goes_on_from_its_newest_checkpoint(c, w, t):
    from workers.protocol.messages import RankEvent

    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    saved = RankEvent("checkpoint", 0, 1.0, 100, {"path": "/store/j/step-10", "step": 10})
    said = t.report("j", 1, 0, "running", saved, cursor=100)
    assert c.hear("a", said)[0] == [("j", "checkpoint", 1)]
    assert c.hear("a", said)[0] == [], "told twice, stored once"
    c.tell(m.DrainRequested("a", now=True))
    assert c.hear("a", t.ended("j", 1, 0, "preempted"))[1] == [RemoveFiles("a", "j", 1)]
    c.tell(m.ResumeRequested("a"))
    _, commands = c.tick()
    [launch] = [x for x in commands if isinstance(x, Launch)]
    assert launch.last_checkpoint == {"pool": "cpu", "path": "j/step-10", "node": "a", "at": 100, "step": 10}


@pytest.mark.parametrize("path", ["/elsewhere/2", "/store/../etc", "../store/x", "store/x", "/store2/x"])
def test_a_checkpoint_outside_of_the_nodes_storage_does_not_count(c, w, t, path):
    from workers.protocol.messages import RankEvent

    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    saved = RankEvent("checkpoint", 0, 1.0, 100, {"path": path, "step": 10})
    assert c.hear("a", t.report("j", 1, 0, "running", saved, cursor=100))[0] == []
