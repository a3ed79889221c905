from dataclasses import replace

import pytest

from orchestrator.core.model import Recovery
from orchestrator.core.retry import MAX_BACKOFF_S, Decision, Ended, after, backoff_s
from orchestrator.core.states import State

NOW_S = 1000.0


def running(w, state=State.RUNNING, *, restarts=0, interruptions=0, first_candidate=0, **recovery):
    return w.job(
        "j",
        state=state,
        restarts=restarts,
        interruptions=interruptions,
        first_candidate=first_candidate,
        recovery=Recovery(**recovery),
    )


def test_success_finishes_the_job(w):
    assert after(running(w, restarts=1), Ended("succeeded"), NOW_S) == Decision(
        "finished", "every rank ended with exit code 0", 1, 0, 0, 0.0
    )


def test_a_failure_of_the_jobs_own_code_ends_it_unless_restarts_are_allowed(w):
    ended = Ended("failed", 0, "user", "ValueError: no such file", (1,))
    assert after(running(w), ended, NOW_S) == Decision("failed", "ValueError: no such file", 0, 0, 0, 0.0)
    assert after(running(w, max_restarts=2), ended, NOW_S) == Decision(
        "interrupted", "restart 1 of 2: ValueError: no such file", 1, 0, 0, NOW_S + 1
    )
    assert after(running(w, max_restarts=2, restarts=2), ended, NOW_S) == Decision(
        "failed",
        "ValueError: no such file (after 2 of 2 restarts); raise recovery.max_restarts to go on longer",
        2,
        0,
        0,
        0.0,
    )


def test_minus_one_is_no_limit(w):
    job = running(w, max_restarts=-1, restarts=500)
    assert after(job, Ended("failed", 0, "user", "x", (1,)), NOW_S).reason == "restart 501: x"


def test_a_failure_without_a_message_names_its_exit_codes(w):
    assert after(running(w), Ended("failed", exit_codes=(0, 3)), NOW_S).reason == "exit codes 0, 3"


def test_a_lost_node_is_an_interruption_and_the_next_candidate_comes_first(w):
    ended = Ended("lost", 1, "internal", "node a was silent for 22 s")
    assert after(running(w), ended, NOW_S) == Decision("interrupted", "node a was silent for 22 s", 0, 1, 2, NOW_S + 1)


def test_interruptions_have_a_budget_too(w):
    decided = after(running(w, max_interruptions=2, interruptions=2), Ended("lost", 0, "", "node a is lost"), NOW_S)
    assert decided.event == "failed"
    assert decided.reason == (
        "node a is lost; all 2 interruptions are used up; raise recovery.max_interruptions to go on longer"
    )


def test_a_preempted_job_keeps_its_place_and_does_not_pause(w):
    decided = after(running(w, State.SAVING, first_candidate=1), Ended("preempted", 0), NOW_S)
    assert decided == Decision("interrupted", "made room for a job of higher priority", 0, 1, 1, NOW_S)


@pytest.mark.parametrize("codes", [(-15,), (-9, 0), (143,)])
def test_a_rank_killed_while_it_was_asked_to_stop_is_no_failure(w, codes):
    decided = after(running(w, State.SAVING), Ended("failed", 0, "signal", "", codes), NOW_S)
    assert (decided.event, decided.restarts, decided.interruptions) == ("interrupted", 0, 1)
    assert decided.not_before_s == NOW_S


def test_an_error_while_saving_is_a_failure(w):
    ended = Ended("failed", 0, "user", "OSError: No space left on device", (1,))
    assert after(running(w, State.SAVING), ended, NOW_S).event == "failed"


@pytest.mark.parametrize(
    ("failure", "codes", "name"),
    [
        ("signal", (-9,), "SIGKILL"),
        ("signal", (-9, 1), "SIGKILL"),
        ("signal", (0, -15), "SIGTERM"),
        ("user", (137,), "SIGKILL"),
        ("signal", (-1, -15), "SIGHUP"),
    ],
)
def test_a_rank_killed_from_outside_is_an_interruption(w, failure, codes, name):
    decided = after(running(w), Ended("failed", 0, failure, "killed", codes), NOW_S)
    assert decided == Decision("interrupted", f"a rank was killed by {name} from outside", 0, 1, 1, NOW_S + 1)


@pytest.mark.parametrize(
    ("failure", "codes"), [("signal", (-11,)), ("signal", (-6, -15)), ("user", (1, -15)), ("user", (1,))]
)
def test_a_crash_is_a_failure_whatever_happened_to_the_other_ranks(w, failure, codes):
    assert after(running(w), Ended("failed", 0, failure, "crashed", codes), NOW_S).event == "failed"


def test_an_exit_code_to_be_retried_is_an_interruption(w):
    job = running(w, retry_exit_codes=(75, 76))
    assert after(job, Ended("failed", 1, "user", "", (75, 0, 76, 75)), NOW_S) == Decision(
        "interrupted", "exit code 75, 76 is to be retried", 0, 1, 0, NOW_S + 1
    )
    assert after(job, Ended("failed", 1, "user", "", (74,)), NOW_S).event == "failed"


@pytest.mark.parametrize("failure", ["oom", "start"])
def test_out_of_memory_and_a_failed_start_move_on_to_the_next_candidate(w, failure):
    ended = Ended("failed", 0, failure, "out of memory", (-9,) if failure == "oom" else (1,))
    decided = after(running(w, max_restarts=1), ended, NOW_S)
    assert (decided.event, decided.restarts, decided.first_candidate) == ("interrupted", 1, 1)


def test_pauses_double_and_stay_below_a_minute(w):
    job = running(w, backoff_s=0.5)
    assert [backoff_s(job, n) for n in (1, 2, 3, 7, 8, 10_000)] == [0.5, 1, 2, 32, MAX_BACKOFF_S, MAX_BACKOFF_S]


def test_an_attempt_that_somebody_cancelled_behind_our_back_is_tried_again(w):
    assert after(running(w), Ended("cancelled"), NOW_S).reason == "the attempt was cancelled"


@pytest.mark.parametrize("state", [State.RUNNING, State.SAVING])
@pytest.mark.parametrize("codes", [(), (-9,), (75, -15)])
def test_what_ranks_broke_themselves_is_a_restart_however_they_were_stopped(w, state, codes):
    """They are killed for it, which is no reason to try for ever."""
    ended = Ended("failed", 1, "unreadable", "events.jsonl is not a regular file", codes)
    assert after(running(w, state, retry_exit_codes=(75,)), ended, NOW_S) == Decision(
        "failed", "events.jsonl is not a regular file", 0, 0, 0, 0.0
    )
    assert after(running(w, state, max_restarts=1), ended, NOW_S) == Decision(
        "interrupted", "restart 1 of 1: events.jsonl is not a regular file", 1, 0, 0, NOW_S + 1
    )


def test_a_launch_that_was_refused_spends_nothing_and_waits_longer_each_time(w):
    ended = Ended("lost", 0, "launch", "node a gave no answer within 20 s")
    job = running(w, State.STARTING, max_interruptions=0, restarts=1)
    first = after(job, ended, NOW_S)
    assert first == Decision(
        "interrupted", "could not be started: node a gave no answer within 20 s", 1, 0, 1, NOW_S + 1, 1
    )
    fourth = after(replace(job, refusals=3), ended, NOW_S)
    assert fourth.reason == "could not be started 4 times in a row: node a gave no answer within 20 s"
    assert (fourth.not_before_s, fourth.refusals) == (NOW_S + 8, 4)
    assert after(replace(job, refusals=99), ended, NOW_S).not_before_s == NOW_S + MAX_BACKOFF_S
    ran = after(replace(job, refusals=3, recovery=Recovery()), Ended("lost", 0, "", "node a is lost"), NOW_S)
    assert (ran.refusals, ran.interruptions) == (0, 1), "it ran: the next refusal is the first in a row"
