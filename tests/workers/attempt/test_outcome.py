import json

import pytest

from workers.attempt import outcome
from workers.messages import OUTCOMES, Outcome


@pytest.mark.parametrize(
    ("why", "codes", "noted", "state"),
    [
        ("", {0: 0, 1: 0}, False, "succeeded"),
        ("failed", {0: 1, 1: -9}, False, "failed"),
        ("preempt", {0: 0, 1: 0}, False, "succeeded"),
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
    assert outcome.state(why, codes, noted, len(codes)) == state
    assert state in OUTCOMES


@pytest.mark.parametrize("codes", [{}, {0: 0}])
def test_a_gang_that_is_preempted_before_every_rank_was_started_has_not_succeeded(codes):
    assert outcome.state("preempt", codes, False, 2) == "preempted"


def test_a_rank_that_failed_by_itself_goes_before_those_we_ended():
    assert outcome.first_bad({0: -15, 1: 0, 2: 1, 3: 2}) == 2
    assert outcome.first_bad({0: 0, 1: -9, 2: -15}) == 1


def test_an_outcome_is_the_message_the_controller_reads():
    failure = outcome.from_exit(1, "n0", -11, "")
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
    found = outcome.from_exit(0, "n0", code, said)
    assert (found.kind, found.message, found.exit_code) == (kind, message, code)
