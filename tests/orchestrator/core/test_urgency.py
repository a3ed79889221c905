"""Weights and deadlines: how much a job counts, whose turn it is, and by how much it will be late."""

from dataclasses import replace

import pytest

from orchestrator.core.explanation.explain import explain
from orchestrator.core.jobs.expected_duration import MAX_WEIGHT, urgency
from orchestrator.core.model import DeclaredWork
from orchestrator.core.plan.plan import plan

HOUR = DeclaredWork(hours=1.0, on="nvidia:H100-80GB")


@pytest.fixture
def first(w):
    """Which of two equal jobs starts on the one device there is."""

    def started(early, late, policy="finish_time"):
        jobs = [w.job(name, number=n, work=HOUR, **more) for n, (name, more) in enumerate((early, late), 1)]
        [start] = plan(w.snapshot([w.devices("a")], jobs, policy=policy)).start
        return start.job

    return started


def test_a_job_counts_more_the_less_slack_it_has_and_nothing_more_once_it_is_late(w):
    counts = [urgency(w.job("j", deadline_s=at_s), 0.0, 3600.0) for at_s in (1e9, 1e5, 1e4, 5000.0, 3600.0)]
    assert counts == sorted(counts) and counts[0] == pytest.approx(1.0, abs=0.001) and counts[-1] == MAX_WEIGHT
    assert urgency(w.job("j", deadline_s=3599.0), 0.0, 3600.0) == 1.0
    assert urgency(w.job("j"), 0.0, 3600.0) == urgency(w.job("j", deadline_s=9.0), 0.0, float("inf")) == 1.0


def test_a_job_of_more_weight_goes_first_among_its_equals(first):
    assert first(("a", {}), ("b", {})) == "a"
    assert first(("a", {}), ("b", {"weight": 2.5})) == "b"
    assert first(("a", {}), ("b", {"weight": 2.5}), "fifo") == "a"


def test_a_near_deadline_goes_first_and_one_that_cannot_be_met_does_not(first):
    assert first(("a", {}), ("b", {"deadline_s": 4000.0})) == "b"
    assert first(("a", {"deadline_s": 9000.0}), ("b", {"deadline_s": 4000.0})) == "b"
    assert first(("a", {"deadline_s": 9000.0}), ("b", {"deadline_s": 1000.0})) == "a"


def test_explain_says_by_how_much_a_job_will_be_late(w):
    seen = w.snapshot([w.devices("a")], [])
    assert explain(w.job("j", work=HOUR, deadline_s=4000.0), seen).late == ""
    assert explain(w.job("j", work=HOUR), seen).late == ""
    late = explain(w.job("j", work=HOUR, deadline_s=1900.0), seen).late
    assert late == "ends 30 min after its deadline at the earliest"
    assert explain(w.job("j", deadline_s=1900.0), seen).late == ""  # how long it takes is not known
    past = explain(w.job("j", deadline_s=1900.0), replace(seen, wall_s=2000.0)).late
    assert past == "its deadline was 100 s ago"
