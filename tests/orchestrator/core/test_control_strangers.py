"""Attempts that nobody here knows, names that two nodes bear, logs that were put back."""

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import RemoveFiles, StartAgent, Stop, UnwatchAgent
from orchestrator.core.controller.nodes import closed_reason
from orchestrator.core.step.control import step_replies


def why(c, node):
    return closed_reason(c.control.nodes[node], c.control.drained, c.s)


def test_an_attempt_of_a_job_that_the_log_does_not_know_is_not_stopped_and_its_node_takes_no_work(c, t):
    c.node("a")
    told = t.report("other", 3, 0, "running")
    assert c.hear("a", told, there=["other.3.0"]) == ([], [])
    assert why(c, "a") == "node a runs other.3.0, unknown to this server's database; run `polyfleet doctor`"
    assert c.tick(3.0) == ([], [])
    c.hear("a", there=())
    assert why(c, "a") == ""


def test_an_attempt_of_a_job_that_has_ended_is_stopped_and_then_forgotten_until_it_is(c, t):
    """Asked again, and not more often than a node can answer: stops and forgets may be lost."""
    c.node("a")
    known = {"stored_jobs": frozenset({"old"}), "there": ["old.2.0"]}
    assert c.hear("a", t.report("old", 2, 0, "running"), **known)[1] == [Stop("a", "old", 2, "cancel")]
    assert why(c, "a") == "node a still runs old.2.0, which was replaced and is being stopped"
    assert c.hear("a", t.ended("old", 2, 0, "cancelled"), **known)[1] == [RemoveFiles("a", "old", 2)]
    assert c.tick(1.0)[1] == []
    assert c.tick(2.0)[1] == [RemoveFiles("a", "old", 2)]
    c.hear("a", there=())
    assert c.tick(5.0)[1] == []


def test_an_attempt_newer_than_the_log_saves_and_its_epoch_is_never_used(c, w, t):
    """The log is an older copy."""
    c.node("a")
    c.submit(w.job("j", w.want("tpu:v5e")))
    told = c.hear("a", t.report("j", 4, 0, "running"), there=["j.4.0"])
    assert told == ([("j", "overtaken", 0)], [Stop("a", "j", 4, "preempt")])
    assert c.control.records["j"].job.next_epoch == 5


def test_a_job_is_not_placed_while_an_attempt_of_it_runs_somewhere(c, w, t):
    c.node("a")
    c.node("b")
    c.submit(w.job("j", w.want("cpu")))
    c.hear("a", t.report("j", 4, 0, "running"), there=["j.4.0"])
    c.tick()
    c.tell(m.FenceAnswered("j", 4, current_epoch=4))
    c.tell(m.FenceAnswered("j", 5, current_epoch=5))
    for _ in range(7):
        c.hear("a", there=["j.4.0"])
        assert c.hear_all("b", seconds=2)[0] == []
    c.hear("a", there=())
    assert c.tick()[0] == [("j", "placed", 5)]


def test_epochs_that_a_node_has_seen_are_never_used_again(c, w):
    c.submit(w.job("j", w.want("tpu:v5e")))
    c.node("a")
    assert c.hear("a", epochs={"j": 2, "gone": 7})[0] == [("j", "overtaken", 0)]
    assert c.hear("a", epochs={"j": 2})[0] == []


def test_the_same_epoch_on_a_node_where_the_log_did_not_place_it_is_stopped(c, w, t):
    c.node("a")
    c.node("b")
    launch = c.run(w.job("j", w.want("cpu")))
    [other] = {"a", "b"} - {*launch.nodes}
    assert c.hear(other, t.report("j", 1, 0, "running"), there=["j.1.0"])[1] == [Stop(other, "j", 1, "cancel")]
    assert c.state("j") == "RUNNING"


def test_a_job_waits_for_a_replaced_attempt_and_says_so_but_not_once_its_node_is_silent_for_a_lease(c, w, t):
    c.node("a")
    c.node("b")
    c.tell(m.DrainRequested("b"))
    c.run(w.job("j", w.want("cpu")))
    c.hear_all("b", seconds=8)
    c.tell(m.FenceAnswered("j", 2, current_epoch=2))
    assert c.hear_all("b", seconds=14)[0] == [("j", "interrupted", 1)]
    c.hear("a", t.report("j", 1, 0, "running"), there=["j.1.0"])  # it was frozen, and its supervisor has yet to look
    c.tell(m.ResumeRequested("b"))
    assert c.hear_all("b", seconds=10)[0] == []
    assert c.control.plan.why_not["j"] == {(0, ""): "waits until attempt j.1, which was replaced, has ended on node a"}
    assert c.hear_all("b", seconds=6)[0] == [("j", "placed", 2)]


def test_an_old_attempt_that_is_told_together_with_the_end_of_its_job_is_known(c, w, t):
    """The store is asked about jobs that are not open; this one was, when the answer came."""
    c.node("a")
    c.node("b")
    launch = c.run(w.job("j", w.want("cpu")))
    [other] = {"a", "b"} - {*launch.nodes}
    beats = [
        m.Heartbeat(launch.nodes[0], f"ray-{launch.nodes[0]}", c.s, reports=(t.ended("j", 1, 0, "succeeded"),)),
        m.Heartbeat(other, f"ray-{other}", c.s, reports=(t.report("j", 0, 0, "running"),)),
    ]
    done = step_replies(c.control, beats, m.Now(c.s))
    assert [e.event for e in done.events] == ["finished"]
    assert Stop(other, "j", 0, "cancel") in done.commands
    assert done.control.nodes[other].unknown_attempts == []


def test_two_living_nodes_with_one_name_do_not_take_turns(c):
    c.node("a")
    both = m.NodesListed((m.ListedNode("ray-a", "a"), m.ListedNode("0second", "a")))
    assert c.tell(both)[1] == [StartAgent("a-0secon", "0second")]
    for _ in range(5):
        assert c.tell(both, 1.0) == ([], [])
    assert c.control.nodes["a"].ray_id == "ray-a"
    assert why(c, "a-0secon") == "node a-0secon has the same name as a, which is up; give every node its own name"


def test_the_second_of_a_name_takes_it_over_when_the_first_has_gone_and_its_attempts_go_on(c, w, t):
    """A raylet that was started again before Ray had missed it."""
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.tell(m.NodesListed((m.ListedNode("ray-a", "a"), m.ListedNode("0second", "a"))))
    c.tell(m.AgentStarted("a-0secon", "0second"))
    assert c.hear("a-0secon", t.report("j", 1, 0, "running"), there=["j.1.0"], ray_id="0second") == ([], [])
    _, commands = c.tell(m.NodesListed((m.ListedNode("0second", "a"),)))
    assert commands == [UnwatchAgent("a", "ray-a"), UnwatchAgent("a-0secon", "0second"), StartAgent("a", "0second")]
    assert list(c.control.nodes) == ["a"]
    c.tell(m.AgentStarted("a", "0second"))
    c.hear("a", t.report("j", 1, 0, "running"), ray_id="0second")
    assert c.tick(0.5) == ([], [])
    assert c.state("j") == "RUNNING"


@pytest.mark.parametrize("after", ["facts", "list"])
def test_a_node_takes_work_only_once_it_has_told_what_runs_there(c, w, t, after):
    c.tell(m.NodesListed((m.ListedNode("ray-a", "a"),)))
    c.tell(m.AgentStarted("a", "ray-a"))
    c.submit(w.job("j", w.want("cpu")))
    c.hear("a", facts=t.facts("a"), attempts=None)
    assert why(c, "a") == "node a has not reported its running attempts yet"
    if after == "list":
        c.hear("a")
    assert c.tick()[0] == ([] if after == "facts" else [("j", "placed", 1)])


def test_an_answer_of_a_node_that_has_another_ray_id_by_now_does_not_count(c, w, t):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    assert c.hear("a", t.ended("j", 1, 0, "succeeded"), ray_id="ray-old") == ([], [])
    assert c.state("j") == "RUNNING"
