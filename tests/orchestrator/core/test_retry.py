from dataclasses import replace

import pytest

from orchestrator.core.jobs.retry import MAX_BACKOFF_S, AttemptEnd, Decision, backoff_s, decide_retry
from orchestrator.core.model import Recovery
from orchestrator.core.states import State


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
    assert decide_retry(running(w, restarts=1), AttemptEnd("succeeded")) == Decision(
        "finished", "every rank ended with exit code 0", 1, 0, 0, 0.0
    )


def test_a_failure_of_the_jobs_own_code_ends_it_unless_restarts_are_allowed(w):
    ended = AttemptEnd("failed", 0, "user", "ValueError: no such file", (1,))
    assert decide_retry(running(w), ended) == Decision("failed", "ValueError: no such file", 0, 0, 0, 0.0)
    assert decide_retry(running(w, max_restarts=2), ended) == Decision(
        "interrupted", "restart 1 of 2: ValueError: no such file", 1, 0, 0, 1
    )
    assert decide_retry(running(w, max_restarts=2, restarts=2), ended) == Decision(
        "failed",
        "ValueError: no such file (after 2 of 2 restarts); to retry in this case, change recovery.max_restarts",
        2,
        0,
        0,
        0.0,
    )


def test_minus_one_is_no_limit(w):
    job = running(w, max_restarts=-1, restarts=500)
    assert decide_retry(job, AttemptEnd("failed", 0, "user", "x", (1,))).reason == "restart 501: x"


def test_a_failure_without_a_message_names_its_exit_codes(w):
    assert decide_retry(running(w), AttemptEnd("failed", exit_codes=(0, 3))).reason == "exit codes 0, 3"


def test_a_lost_node_is_an_interruption_and_the_next_candidate_comes_first(w):
    ended = AttemptEnd("lost", 1, "internal", "node a was silent for 22 s")
    assert decide_retry(running(w), ended) == Decision("interrupted", "node a was silent for 22 s", 0, 1, 2, 1)


def test_interruptions_have_a_budget_too(w):
    decided = decide_retry(
        running(w, max_interruptions=2, interruptions=2), AttemptEnd("lost", 0, "", "node a is lost")
    )
    assert decided.event == "failed"
    assert decided.reason == (
        "node a is lost; all 2 interruptions are used up; to retry in this case, change recovery.max_interruptions"
    )


def test_a_preempted_job_keeps_its_place_and_does_not_pause(w):
    decided = decide_retry(
        running(w, State.SAVING, first_candidate=1), AttemptEnd("preempted", 0, stop_reason="big needs the node")
    )
    assert decided == Decision("interrupted", "big needs the node", 0, 1, 1)


@pytest.mark.parametrize("codes", [(-15,), (-9, 0), (143,)])
def test_a_rank_killed_while_it_was_asked_to_stop_is_no_failure(w, codes):
    decided = decide_retry(running(w, State.SAVING), AttemptEnd("failed", 0, "signal", "", codes))
    assert (decided.event, decided.restarts, decided.interruptions) == ("interrupted", 0, 1)
    assert decided.pause_s == 0


def test_what_a_command_said_when_it_was_asked_to_stop_is_told_and_costs_no_restart(w):
    ended = AttemptEnd(
        "preempted", 0, "user", "rank 0 ended with exit code 1: SignalException", (1,), stop_reason="big needs it"
    )
    decided = decide_retry(running(w, State.SAVING), ended)
    told = "big needs it; rank 0 ended with exit code 1: SignalException"
    assert decided == Decision("interrupted", told, 0, 1, 0)


def test_an_error_while_saving_is_a_failure(w):
    ended = AttemptEnd("failed", 0, "user", "OSError: No space left on device", (1,))
    assert decide_retry(running(w, State.SAVING), ended).event == "failed"


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
    decided = decide_retry(running(w), AttemptEnd("failed", 0, failure, "killed", codes))
    assert decided == Decision("interrupted", f"a rank was killed by {name} from outside", 0, 1, 1, 1)


@pytest.mark.parametrize(
    ("failure", "codes"), [("signal", (-11,)), ("signal", (-6, -15)), ("user", (1, -15)), ("user", (1,))]
)
def test_a_crash_is_a_failure_whatever_happened_to_the_other_ranks(w, failure, codes):
    assert decide_retry(running(w), AttemptEnd("failed", 0, failure, "crashed", codes)).event == "failed"


def test_an_exit_code_to_be_retried_is_an_interruption(w):
    job = running(w, retry_exit_codes=(75, 76))
    assert decide_retry(job, AttemptEnd("failed", 1, "user", "", (75, 0, 76, 75))) == Decision(
        "interrupted", "exit code 75, 76 is in recovery.retry_exit_codes", 0, 1, 0, 1
    )
    assert decide_retry(job, AttemptEnd("failed", 1, "user", "", (74,))).event == "failed"


@pytest.mark.parametrize("failure", ["oom", "start"])
def test_out_of_memory_and_a_failed_start_move_on_to_the_next_candidate(w, failure):
    ended = AttemptEnd("failed", 0, failure, "out of memory", (-9,) if failure == "oom" else (1,))
    decided = decide_retry(running(w, max_restarts=1), ended)
    assert (decided.event, decided.restarts, decided.first_candidate) == ("interrupted", 1, 1)


def test_pauses_double_and_stay_below_a_minute(w):
    job = running(w, backoff_s=0.5)
    assert [backoff_s(job, n) for n in (1, 2, 3, 7, 8, 10_000)] == [0.5, 1, 2, 32, MAX_BACKOFF_S, MAX_BACKOFF_S]


def test_an_attempt_that_somebody_cancelled_behind_our_back_is_tried_again(w):
    assert decide_retry(running(w), AttemptEnd("cancelled")).reason == "the attempt was cancelled"


@pytest.mark.parametrize("state", [State.RUNNING, State.SAVING])
@pytest.mark.parametrize("codes", [(), (-9,), (75, -15)])
def test_what_ranks_broke_themselves_is_a_restart_however_they_were_stopped(w, state, codes):
    """They are killed for it, which is no reason to try for ever."""
    ended = AttemptEnd("failed", 1, "unreadable", "events.jsonl is not a regular file", codes)
    assert decide_retry(running(w, state, retry_exit_codes=(75,)), ended) == Decision(
        "failed", "events.jsonl is not a regular file", 0, 0, 0, 0.0
    )
    assert decide_retry(running(w, state, max_restarts=1), ended) == Decision(
        "interrupted", "restart 1 of 1: events.jsonl is not a regular file", 1, 0, 0, 1
    )


def test_a_launch_that_was_refused_spends_nothing_and_waits_longer_each_time(w):
    ended = AttemptEnd("lost", 0, "launch", "node a gave no answer within 20 s")
    job = running(w, State.STARTING, max_interruptions=0, restarts=1)
    first = decide_retry(job, ended)
    assert first == Decision(
        "interrupted", "the attempt could not be started: node a gave no answer within 20 s", 1, 0, 0, 1, 1
    )
    fourth = decide_retry(replace(job, refusals=3), ended)
    assert fourth.reason == "the attempt could not be started 4 times in a row: node a gave no answer within 20 s"
    assert (fourth.pause_s, fourth.refusals) == (8, 4)
    assert decide_retry(replace(job, refusals=99), ended).pause_s == MAX_BACKOFF_S
    ran = decide_retry(replace(job, refusals=3, recovery=Recovery()), AttemptEnd("lost", 0, "", "node a is lost"))
    assert (ran.refusals, ran.interruptions) == (0, 1), "it ran: the next refusal is the first in a row"


@pytest.mark.parametrize("kind", ["oom", "storage", "start"])
def test_a_place_that_was_too_small_costs_a_restart_and_comes_last_next_time(w, kind):
    ended = AttemptEnd("failed", 0, kind, "peak 9 GiB, limit 8 GiB", (1,) if kind == "start" else (-9,), ("a",))
    assert decide_retry(running(w, max_restarts=1), ended) == Decision(
        "interrupted", "restart 1 of 1: peak 9 GiB, limit 8 GiB", 1, 0, 1, 1, avoid=("a",)
    ), "the next candidate"
    assert decide_retry(running(w), ended).event == "failed", "never retried without end"


def test_a_loss_that_is_no_number_ends_the_job_unless_it_says_restart(w):
    ended = AttemptEnd("failed", 0, "nan", "loss is nan at step 7", (1,))
    assert decide_retry(running(w, max_restarts=5), ended) == Decision(
        "failed", "loss is nan at step 7; to retry in this case, change recovery.on_events (nan: restart)", 0, 0, 0
    )
    assert decide_retry(running(w, max_restarts=5, on_events={"nan": "restart"}), ended).event == "interrupted"


@pytest.mark.parametrize(
    ("action", "restarts", "interruptions", "first"), [("restart", 1, 0, 0), ("next", 1, 0, 1), ("retry", 0, 1, 1)]
)
def test_what_the_user_says_of_a_kind_of_failure_replaces_the_default(w, action, restarts, interruptions, first):
    job = running(w, max_restarts=1, max_interruptions=1, on_events={"user": action})
    decided = decide_retry(job, AttemptEnd("failed", 0, "user", "ValueError", (1,), ("a",)))
    assert (decided.event, decided.restarts, decided.interruptions, decided.first_candidate) == (
        "interrupted", restarts, interruptions, first,
    )  # fmt: skip


def test_a_kind_that_is_to_fail_ends_the_job_with_that_reason(w):
    decided = decide_retry(
        running(w, max_restarts=9, on_events={"oom": "fail"}), AttemptEnd("failed", 0, "oom", "peak 9 GiB", (-9,))
    )
    assert (decided.event, decided.reason) == ("failed", "peak 9 GiB; recovery.on_events sets oom to fail")


def test_a_job_that_is_to_stop_when_it_is_cut_off_ends_with_its_node(w):
    decided = decide_retry(
        running(w, on_disconnect="stop"), AttemptEnd("lost", 0, "lost", "node a has not answered for 7 s")
    )
    assert (decided.event, decided.reason) == (
        "failed",
        "node a has not answered for 7 s; recovery.on_disconnect is stop",
    )


def test_a_rank_that_was_told_that_its_attempt_was_replaced_did_not_fail(w):
    ended = AttemptEnd("failed", 0, "lost", "this attempt may not save: attempt 2 has superseded it", (1,), ("a",))
    decided = decide_retry(running(w), ended)
    assert (decided.event, decided.restarts, decided.interruptions) == ("interrupted", 0, 1)
