import os
import signal
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from workers.tasks.stop_flag import AHEAD, StopFlag


@pytest.fixture(autouse=True)
def _own_handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_seen_at_the_next_poll_and_stays_seen():
    stop = StopFlag()
    stop.listen()
    assert not stop.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    assert not stop.is_observed
    assert stop.poll()
    assert stop.poll()
    assert stop.is_observed


def test_ranks_that_are_asked_at_different_steps_stop_at_the_same_one():
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=20))
    early, late = StopFlag(), StopFlag()
    early.share(store)
    late.share(store)
    answers = {early: [], late: []}
    for step in range(20):
        early.requested, late.requested = step >= 5, step >= 7
        for stop in (late, early):
            answers[stop].append(stop.poll())
    assert answers[early] == answers[late]
    assert answers[early].index(True) == 5 + AHEAD


def test_a_rank_that_was_never_asked_stops_with_the_others():
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=20))
    asked, other = StopFlag(), StopFlag()
    asked.share(store)
    other.share(store)
    asked.requested = True
    assert [asked.poll() for _ in range(AHEAD + 1)] == [False] * AHEAD + [True]
    assert [other.poll() for _ in range(AHEAD + 1)] == [False] * AHEAD + [True]
