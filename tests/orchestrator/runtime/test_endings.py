import pytest

from orchestrator.core.model import Job
from orchestrator.core.retry import Ended
from orchestrator.runtime.endings import combine, result_of
from orchestrator.runtime.live import Live, Part, lost_outcome

JOB = Job("j", "j", "train", ())


def part(state: str, **more: object) -> Part:
    outcome = lost_outcome(JOB, 1, 0, "n", "why") | {"state": state, "failure": None} | more
    return Part("n", "n/cpu", (0,), "ended", ended=outcome)


@pytest.mark.parametrize(
    ("states", "decisive"),
    [
        (("succeeded", "succeeded"), "succeeded"),
        (("succeeded", "preempted"), "preempted"),
        (("cancelled", "lost"), "lost"),
        (("cancelled", "failed"), "failed"),
    ],
)
def test_the_gravest_ending_of_a_node_is_that_of_the_attempt(states, decisive):
    ended, _ = combine(Live("j", 1, [part(state) for state in states]), candidate=2)
    assert (ended.state, ended.candidate) == (decisive, 2)


def test_the_first_failure_and_all_exit_codes_are_told():
    failure = {"rank": 1, "node": "n", "kind": "user", "message": "boom", "traceback": "", "exit_code": 1}
    parts = [part("cancelled", exit_codes={0: -9}), part("failed", exit_codes={1: 1}, failure=failure)]
    ended, outcome = combine(Live("j", 1, parts), 0)
    assert ended == Ended("failed", 0, "user", "boom", (-9, 1))
    assert outcome["failure"]["message"] == "boom"


def test_a_state_that_is_none_of_ours_is_an_unreadable_failure_and_decides():
    user = {"rank": 1, "node": "n", "kind": "user", "message": "boom", "traceback": "", "exit_code": 1}
    ended, outcome = combine(Live("j", 1, [part("failed", failure=user), part("weird"), part("succeeded")]), 0)
    assert (ended.state, ended.failure) == ("failed", "unreadable")
    assert ended.message == "the attempt ended in the unknown state 'weird'"
    assert outcome["failure"]["kind"] == "unreadable"


def test_the_result_is_that_of_rank_zero_which_lives_on_the_first_node():
    assert result_of(Live("j", 1, [part("succeeded", result={"a": 1}), part("succeeded", result={})])) == {"a": 1}


def test_an_attempt_is_over_when_every_part_ended_and_nothing_is_being_launched():
    live = Live("j", 1, [part("succeeded"), Part("m", "m/cpu", (0,))])
    assert not live.over
    live.parts[1].ended = lost_outcome(JOB, 1, 1, "m", "gone")
    assert live.over
    live.launching = True
    assert not live.over
