"""Copies between machines keep to the server's limit. Time is data here."""

from dataclasses import replace

import pytest
from passing_time import PassingTime

from cluster.serialization import from_plain
from cluster.types import NodeFacts
from orchestrator.runtime.checkpoints.bandwidth_limit import Pacer, RateLimit

MB = 10**6


def test_pieces_wait_for_those_before_them_and_a_rest_is_not_made_up_for():
    pacer, ends = Pacer(10.0), ("a", "b")
    assert [pacer.book(ends, now_s, size) for now_s, size in ((0.0, 20), (0.0, 20), (1.0, 5))] == [0.0, 2.0, 3.0]
    assert [pacer.book(ends, 60.0, 20) for _ in range(2)] == [0.0, 2.0]


@pytest.fixture
def machines(recorded):
    """Facts of a node on each of three machines, and of a second one on the first."""
    one = from_plain(NodeFacts, recorded.RECORDED[0])
    a, b, c = (replace(one, node=name, host=name, address=f"10.0.0.{number}") for number, name in enumerate("abc"))
    return a, b, c, replace(a, node="a2")


def test_what_one_machine_sends_and_receives_keeps_to_the_limit_together(machines):
    a, b, c, _ = machines
    time = PassingTime()
    pace = RateLimit(MB, time.now, time.sleep)
    pace.wait(a, b, 2 * MB)
    assert time.now_s == 100.0
    pace.wait(c, a, MB)
    assert time.now_s == 102.0
    pace.wait(b, c, MB)
    assert time.now_s == 103.0


def test_nothing_waits_within_one_machine_or_without_a_limit(machines):
    a, b, _, beside = machines
    for pace, source, target in ((RateLimit(MB), a, beside), (RateLimit(None), a, b), (RateLimit(MB), a, None)):
        for _ in range(3):
            pace.wait(source, target, 1 << 40)
