"""What follows from a node that could not be reached, for how long that explains failures, and what does not follow."""

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Stop
from orchestrator.core.controller.messages import Now
from orchestrator.core.fleet import leaked_devices
from orchestrator.core.model import Recovery
from orchestrator.core.step.control import control_from_log
from orchestrator.core.timing import CUT_OFF_AFTERMATH_S


@pytest.fixture
def gang(c, w):
    """Gang g runs on nodes a and b; b was silent, was fenced off, answers again, and counts again."""
    c.node("a")
    c.node("b")
    c.run(w.job("g", w.want("cpu", nodes=2)))
    c.hear_all("a", seconds=8)
    c.tell(m.FenceAnswered("g", 2, current_epoch=2))
    c.hear("b")
    c.tick()
    c.tell(m.FenceAnswered("g", 1, current_epoch=1))
    return c


def fail(c, t):
    """Node a tells that its part failed. How b is asked to end its part."""
    [stop] = c.hear("a", t.ended("g", 1, 0, "failed", "user", "ValueError: 7", {0: 1}))[1]
    return stop.how


def test_a_failure_long_after_a_node_could_not_be_reached_is_the_jobs_own(gang, t):
    gang.hear_all("a", "b", seconds=CUT_OFF_AFTERMATH_S + 10)
    assert fail(gang, t) == "cancel"
    assert gang.hear("b", t.ended("g", 1, 1, "cancelled", node="b"))[0] == [("g", "failed", 1)]
    assert gang.events[0].data["reason"] == "node a (node rank 0): ValueError: 7"


def test_a_failure_soon_after_a_node_could_not_be_reached_follows_from_that(gang, t):
    """Connections that had broken are noticed late."""
    gang.hear_all("a", "b", seconds=CUT_OFF_AFTERMATH_S / 2)
    assert fail(gang, t) == "fence"
    assert gang.hear("b", t.ended("g", 1, 1, "fenced", node="b"))[0] == [("g", "interrupted", 1)]
    assert gang.events[0].data["reason"] == "node b has not answered for 7 s; node b then ended its part"


def test_a_node_that_cannot_be_reached_again_is_a_new_reason(gang, t):
    gang.hear_all("a", "b", seconds=CUT_OFF_AFTERMATH_S + 10)
    gang.hear_all("b", seconds=8)
    assert gang.control.attempts["g"].cut_off.reason == "node a has not answered for 7 s"


def test_a_launch_whose_answer_was_lost_explains_nothing_once_every_part_has_reported(c, w, t):
    c.node("a")
    c.node("b")
    c.place(w.job("g", w.want("cpu", nodes=2)))
    c.hear("a", t.report("g", 1, 0, "running"))
    c.tell(m.LaunchFailed("g", 1, "launch", "node b gave no answer", maybe_started=("a", "b"), unanswered=("b",)))
    c.hear("b", t.report("g", 1, 1, "running"))
    c.hear_all("a", "b", seconds=CUT_OFF_AFTERMATH_S + 10)
    assert fail(c, t) == "cancel"


def test_what_its_user_got_wrong_on_one_node_ends_a_gang_of_which_another_part_has_started(c, w, t):
    c.node("a")
    c.node("b")
    c.place(w.job("g", w.want("cpu", nodes=2)))
    why = "the submitted folder holds a module named workers"
    assert c.tell(m.LaunchFailed("g", 1, "user", why, maybe_started=("a",)))[1] == [Stop("a", "g", 1, "cancel")]
    assert not [x for x in c.tick()[1] if isinstance(x, Stop)], "nor is it fenced off in the same turn"
    c.hear("a", t.report("g", 1, 0, "running"))
    assert c.hear("a", t.ended("g", 1, 0, "cancelled"))[0] == [("g", "failed", 1)]
    assert c.events[0].data["reason"] == f"node b (node rank 1): {why}"


def test_what_its_user_got_wrong_decides_also_where_the_other_node_is_lost(c, w, t):
    c.node("a")
    c.node("b")
    c.place(w.job("g", w.want("cpu", nodes=2)))
    c.tell(m.LaunchFailed("g", 1, "user", "secrets.X is not set", maybe_started=("a",)))
    assert c.hear("a", t.ended("g", 1, 0, "lost", "lost", "its supervisor is gone"))[0] == [("g", "failed", 1)]


@pytest.mark.parametrize("actions", [{}, {"user": "restart"}])
def test_what_its_user_got_wrong_before_the_start_is_not_tried_again(c, w, actions):
    """It would be as wrong the next time."""
    c.node("a")
    c.place(w.job("j", w.want("cpu"), recovery=Recovery(max_restarts=3, on_events=actions)))
    assert c.tell(m.LaunchFailed("j", 1, "user", "secrets.X is not set"))[0] == [("j", "failed", 1)]
    assert c.events[0].data["reason"] == "secrets.X is not set"


def goes_on(c, seconds):
    """Node a hears every stop and stops nothing. What is told of that."""
    commands, told = [], []
    for _ in range(seconds):
        for stop in (x for x in commands if isinstance(x, Stop)):
            c.tell(m.StopAnswered("a", "j", 1, stop.how))
        c.hear("a")
        commands = c.tick(1.0)[1]
        told = leaked_devices.list_leaks(c.control, Now(c.s))
    return [leak.holder for leak in told]


def test_an_attempt_that_goes_on_after_its_job_was_cancelled_is_told_of(c, w):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.tell(m.CancelRequested("j"))
    assert goes_on(c, 10) == []
    assert goes_on(c, 30) == ["j.1"], "it is asked again, and that is no new beginning"


def test_an_attempt_that_goes_on_after_its_cancel_is_told_of_by_a_server_that_started_since(c, w):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.tell(m.CancelRequested("j"))
    c.control = control_from_log(c.control.records.values(), {}, lambda job, epoch: 0, Now(c.s, c.wall_s))
    c.tell(m.ClusterJoined())
    c.node("a")
    assert goes_on(c, 40) == ["j.1"]
