"""Cancels: they win over whatever comes after them, and every device comes back."""

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Fence, Release, RemoveFiles, Stop


def test_a_waiting_job_is_cancelled_at_once_and_closed(c, w):
    c.submit(w.job("j"))
    assert c.tell(m.CancelRequested("j")) == ([("j", "cancelled", 0)], [])
    assert not c.control.records


def test_a_running_job_is_stopped_and_released_when_its_node_says_that_it_ended(c, w, t):
    c.node("a")
    launch = c.run(w.job("j", w.want("cpu")))
    assert c.tell(m.CancelRequested("j")) == ([("j", "cancelled", 1)], [Stop("a", "j", 1, "cancel")])
    c.tell(m.StopAnswered("a", "j", 1, "cancel"))
    assert c.hear("a", t.ended("j", 1, 0, "cancelled")) == ([("j", "released", 1)], [RemoveFiles("a", "j", 1)])
    assert c.tick() == ([], [Release(launch.reservation_name)])
    assert not c.control.records and not c.control.attempts


def test_a_cancel_between_the_ends_of_two_parts_still_releases(c, w, t):
    """Whatever came first, the last part's end writes `released`: devices are not leased for ever."""
    c.node("a")
    c.node("b")
    c.run(w.job("g", w.want("cpu", nodes=2)))
    c.hear("a", t.ended("g", 1, 0, "succeeded"))
    assert c.tell(m.CancelRequested("g"))[0] == [("g", "cancelled", 1)]
    assert c.hear("b", t.ended("g", 1, 1, "succeeded"))[0] == [("g", "released", 1)]
    assert not c.control.records and not c.control.attempts


@pytest.mark.parametrize("answer", ["launched", "failed"])
def test_a_cancel_during_a_launch_waits_for_its_answer_and_then_stops_it(c, w, t, answer):
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    assert c.tell(m.CancelRequested("j")) == ([("j", "cancelled", 1)], [])
    if answer == "launched":
        assert c.tell(m.Launched("j", 1))[1] == [Stop("a", "j", 1, "cancel")]
        assert c.hear("a", t.ended("j", 1, 0, "cancelled"))[0] == [("j", "released", 1)]
    else:
        assert c.tell(m.LaunchFailed("j", 1, "launch", "no devices"))[0] == [("j", "released", 1)]
    assert not c.control.records and not c.control.attempts


def test_a_success_that_was_told_before_the_cancel_stays_one(c, w, t):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.hear("a", t.ended("j", 1, 0, "succeeded"))
    assert c.tell(m.CancelRequested("j")) == ([], [])


def test_a_second_cancel_changes_nothing_and_nothing_is_placed_after_the_first(c, w, t):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.tell(m.CancelRequested("j"))
    assert c.tell(m.CancelRequested("j", "again")) == ([], [])
    c.hear("a", t.ended("j", 1, 0, "cancelled"))
    assert c.hear_all("a", seconds=10)[0] == []


def test_a_stop_that_was_not_heard_is_asked_for_again(c, w):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.tell(m.CancelRequested("j"))
    assert c.tell(m.StopAnswered("a", "j", 1, "cancel", "no answer")) == ([], [])
    _, commands = c.hear_all("a", seconds=6)
    assert commands[0] == Stop("a", "j", 1, "cancel")


def test_a_cancelled_job_on_a_node_that_went_silent_is_released_after_its_lease(c, w):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.tell(m.CancelRequested("j"))
    events, commands = c.tick(8.0)
    assert events == [] and Fence("j", 2) in commands
    c.tell(m.FenceAnswered("j", 2, current_epoch=2))
    assert c.tick(13.0)[0] == [("j", "released", 1)]


def test_a_job_that_has_ended_cannot_be_moved_and_says_what_to_do(c):
    [refused] = c.tell(m.MigrateRequested("gone", ("cpu",)))[1]
    assert (refused.message, refused.remedy) == ("job gone has ended", "submit it again with resume_from")
