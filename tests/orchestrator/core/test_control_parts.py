"""Parts of attempts: an end is final, phases never go back, and a doubt ends only by what was said after it."""

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.attempts import PartState
from orchestrator.core.controller.commands import Fence, Stop


@pytest.fixture
def launching(c, w):
    """Gang g on nodes a and b, whose launch is under way."""
    c.node("a")
    c.node("b")
    c.place(w.job("g", w.want("cpu", nodes=2)))
    return c


def part(c, rank, job="g"):
    return c.control.attempts[job].parts[rank]


def test_a_part_that_has_ended_is_not_in_doubt_when_the_answer_of_its_launch_is_lost(launching, t):
    """Its sister, which was preempted with it, keeps its grace."""
    launching.hear("a", t.report("g", 1, 0, "running"))
    launching.hear("a", t.ended("g", 1, 0, "preempted"))
    told = m.LaunchFailed("g", 1, "launch", "node b gave no answer", maybe_started=("a", "b"), unanswered=("b",))
    launching.tell(told)
    assert (part(launching, 0).outcome.state, part(launching, 0).doubt) == ("preempted", "")
    assert part(launching, 1).doubt == "node b gave no answer"
    launching.hear("b", t.report("g", 1, 1, "running"))
    assert launching.tick()[1] == [Stop("b", "g", 1, "preempt")]


def test_a_part_that_its_node_has_reported_was_started_and_is_not_in_doubt(launching, t):
    launching.hear("a", t.report("g", 1, 0, "running"))
    launching.tell(
        m.LaunchFailed("g", 1, "launch", "node b gave no answer", maybe_started=("a", "b"), unanswered=("b",))
    )
    assert (part(launching, 0).doubt, part(launching, 1).doubt) == ("", "node b gave no answer")


def test_a_part_that_its_node_refused_has_not_started_whatever_it_told_while_it_tried(launching, t):
    launching.hear("a", t.report("g", 1, 0, "starting"))
    launching.tell(m.LaunchFailed("g", 1, "launch", "the disk of node a is full"))
    assert "g" not in launching.control.attempts, "no part may have started: the attempt has ended"


def test_what_cannot_be_read_of_a_part_that_has_succeeded_changes_nothing(gang, t):
    gang.hear("a", t.ended("g", 1, 0, "succeeded", codes={0: 0}))
    assert gang.tell(m.PartUnreadable("g", 1, 0, "its events cannot be read")) == ([], [])
    assert gang.tell(m.PartUnreadable("g", 1, 0, "its events cannot be read", ended=True)) == ([], [])
    assert gang.tick()[1] == [], "its sister is not stopped"
    assert gang.hear("b", t.ended("g", 1, 1, "succeeded", codes={1: 0}))[0] == [("g", "finished", 1)]


def test_an_unreadable_message_about_a_part_that_its_node_does_not_list_stops_it_and_ends_no_doubt(gang):
    """The message may be older than that list. The next list that has the part ends the doubt."""
    gang.hear("a", there=(), after_s=5.0)
    gang.tell(m.PartUnreadable("g", 1, 0, "its events cannot be read"))
    assert (part(gang, 0).state, bool(part(gang, 0).doubt)) == (PartState.UNCONFIRMED, True)
    assert Stop("a", "g", 1, "cancel") in gang.tick()[1]
    gang.hear("a", after_s=1.0)
    assert (part(gang, 0).state, part(gang, 0).doubt) == (PartState.UNREADABLE, "")


def test_an_answer_that_comes_late_moves_no_part_back(gang, t):
    gang.hear("a", t.report("g", 1, 0, "starting"), requested_s=gang.s - 5.0)
    assert part(gang, 0).phase == "running"


def test_a_report_from_before_its_node_had_no_record_of_the_part_ends_no_doubt(gang, t):
    before_s = gang.s
    gang.hear("a", there=(), after_s=5.0)
    assert Fence("g", 2) in gang.tick()[1]
    gang.tell(m.FenceAnswered("g", 2, current_epoch=2))
    gang.hear("a", t.report("g", 1, 0, "running"), requested_s=before_s)
    assert part(gang, 0).doubt == "node a has no record of this attempt"
    assert not [x for x in gang.tick()[1] if isinstance(x, Fence)], "its fence stays"
    gang.hear("a", t.report("g", 1, 0, "running"), after_s=1.0)
    assert part(gang, 0).doubt == ""


def test_a_part_that_the_newest_list_of_its_node_has_again_is_in_doubt_no_more(c, w):
    """Its agent could not read it, and the next one can. Nothing of the part is news, so that no report comes."""
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.hear("a", there=(), after_s=5.0)
    c.tick()
    c.tell(m.FenceAnswered("j", 2, current_epoch=2))
    c.hear("a", after_s=1.0)
    assert part(c, 0, "j").doubt == ""
    assert Fence("j", 1, lower=True) in c.tick()[1], "it counts again"
    c.tell(m.FenceAnswered("j", 1, current_epoch=1))
    assert c.hear_all("a", seconds=60) == ([], [])
    assert c.state("j") == "RUNNING"


def test_a_list_from_before_its_node_had_no_record_of_the_part_ends_no_doubt(gang):
    before_s = gang.s
    gang.hear("a", there=(), after_s=5.0)
    gang.hear("a", requested_s=before_s)
    assert part(gang, 0).doubt == "node a has no record of this attempt"


def test_a_part_whose_start_was_not_answered_and_that_its_node_lists_was_started(launching):
    launching.tell(
        m.LaunchFailed("g", 1, "launch", "node b gave no answer", maybe_started=("a", "b"), unanswered=("b",))
    )
    assert [p.doubt for p in launching.control.attempts["g"].parts] == ["node b gave no answer"] * 2
    launching.hear("a", after_s=1.0)
    launching.hear("b", there=())
    assert [p.doubt for p in launching.control.attempts["g"].parts] == ["", "node b gave no answer"]


def test_the_end_that_a_late_answer_tells_counts_all_the_same(gang, t):
    before_s = gang.s
    gang.hear("a", there=(), after_s=5.0)
    gang.hear("a", t.ended("g", 1, 0, "succeeded", codes={0: 0}), requested_s=before_s)
    assert part(gang, 0).outcome.state == "succeeded"
