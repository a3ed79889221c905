import json

import pytest

from workers.attempt.supervision import outcome
from workers.protocol.messages import OUTCOMES, Outcome


@pytest.mark.parametrize(
    ("why", "codes", "noted", "state"),
    [
        ("", {0: 0, 1: 0}, False, "succeeded"),
        ("failed", {0: 1, 1: -9}, False, "failed"),
        ("preempt", {0: 0, 1: 0}, False, "preempted"),
        ("preempt", {0: 0, 1: 0}, True, "preempted"),
        ("preempt", {0: -15, 1: 143}, False, "preempted"),
        ("preempt", {0: 0, 1: -9}, False, "preempted"),
        ("preempt", {0: 1}, False, "failed"),
        ("preempt", {0: 0, 1: 1}, True, "preempted"),
        ("cancel", {0: 0}, False, "cancelled"),
        ("cancel", {0: 1}, True, "cancelled"),
        ("fence", {0: 0}, True, "fenced"),
        ("lease", {0: 0}, True, "lost"),
    ],
)
def test_the_state_follows_from_why_it_ended_and_the_exit_codes(why, codes, noted, state):
    asked = outcome.Preemption(frozenset(codes), noted)
    assert outcome.state(why, codes, len(codes), asked) == state
    assert state in OUTCOMES


@pytest.mark.parametrize("command", [True, False])
@pytest.mark.parametrize(
    ("codes", "asked", "done", "state"),
    [
        ({0: 0, 1: 0}, {0, 1}, {0, 1}, "succeeded"),
        ({0: 0, 1: 0}, {0, 1}, {0}, "preempted"),
        ({0: 0, 1: 0}, {1}, {1}, "succeeded"),
        ({0: 0, 1: 0}, {1}, (), "preempted"),
        ({0: 0, 1: 0}, (), (), "succeeded"),
        ({0: 0, 1: -15}, {1}, {0}, "preempted"),
        ({0: 1, 1: 0}, {1}, (), "failed"),
        ({0: 1, 1: -15}, {1}, {1}, "failed"),
    ],
)
def test_work_is_done_where_ranks_ended_before_they_were_asked_to_stop_or_say_so(command, codes, asked, done, state):
    known = outcome.Preemption(frozenset(asked), False, frozenset(done), command)
    assert outcome.state("preempt", codes, len(codes), known) == state


@pytest.mark.parametrize(("command", "state"), [(True, "preempted"), (False, "failed")])
def test_a_command_that_was_asked_to_stop_may_end_with_any_code_and_a_task_of_ours_that_raises_has_failed(
    command, state
):
    known = outcome.Preemption(frozenset({0, 1}), is_command=command)
    assert outcome.state("preempt", {0: 1, 1: 0}, 2, known) == state


def test_the_notes_of_ranks_tell_who_is_done_and_that_one_stopped_early(tmp_path):
    lines = [{"type": "note", "t": 5, "rank": 1, "done": True}, {"type": "note", "t": 5, "rank": 0, "done": 1}]
    lines += [{"type": "report", "t": 5}, {"type": "note", "rank": 3, "done": True}]
    lines += [{"type": "report", "rank": 2, "done": True}, {"type": "note", "rank": True, "done": True}]
    (tmp_path / "events").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"done"\n')
    assert outcome.read_notes(tmp_path / "events", 9.0) == (False, frozenset({1}))
    with (tmp_path / "events").open("a") as file:
        file.write(json.dumps({"type": "note", "rank": 0, "preempted": True}) + "\n")
    assert outcome.read_notes(tmp_path / "events", 9.0) == (True, frozenset({1}))
    assert outcome.read_notes(tmp_path / "absent", 9.0) == (False, frozenset())


@pytest.mark.parametrize(
    ("at", "sigterm", "done"), [(9.0, False, True), (10.5, True, True), (10.5, False, False), (10.5, 1, False)]
)
def test_a_function_that_returns_after_a_sigterm_which_ours_did_not_get_may_have_stopped_early(
    tmp_path, at, sigterm, done
):
    note = {"type": "note", "t": at, "rank": 0, "done": True, "sigterm": sigterm}
    (tmp_path / "events").write_text(json.dumps(note) + "\n")
    assert outcome.read_notes(tmp_path / "events", 10.0) == (False, frozenset({0} if done else ()))


@pytest.mark.parametrize("codes", [{}, {0: 0}])
def test_a_gang_that_is_preempted_before_every_rank_was_started_has_not_succeeded(codes):
    assert outcome.state("preempt", codes, 2, outcome.Preemption()) == "preempted"


def test_a_rank_that_failed_by_itself_goes_before_those_we_ended():
    assert outcome.first_failed_rank({0: -15, 1: 0, 2: 1, 3: 2}) == 2
    assert outcome.first_failed_rank({0: 0, 1: -9, 2: -15}) == 1


def test_an_outcome_is_the_message_the_controller_reads():
    failure = outcome.failure_from_exit(1, "n0", -11, "")
    read = Outcome.parse(json.loads(json.dumps(Outcome("j", 2, 1, "failed", {1: -11, 0: 0}, failure).to_plain())))
    assert (read.exit_codes, read.failure.message) == ({0: 0, 1: -11}, "rank 1 was killed by SIGSEGV")


@pytest.mark.parametrize(
    ("code", "said", "kind", "message"),
    [
        (2, "boom", "user", "rank 0 ended with exit code 2: boom"),
        (2, "", "user", "rank 0 ended with exit code 2"),
        (-9, "", "signal", "rank 0 was killed by SIGKILL"),
        (-40, "", "signal", "rank 0 was killed by signal 40"),
    ],
)
def test_an_exit_code_is_put_into_words(code, said, kind, message):
    found = outcome.failure_from_exit(0, "n0", code, said)
    assert (found.kind, found.message, found.exit_code) == (kind, message, code)
