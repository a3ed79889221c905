"""Jobs that wait long come before others of a somewhat higher priority, and stop nobody by that."""

from dataclasses import replace

import pytest

from orchestrator.core.jobs import fold
from orchestrator.core.jobs.expected_duration import tier
from orchestrator.core.model import Since
from orchestrator.core.plan.plan import plan
from orchestrator.core.plan.policies.priced_policies import POLICIES


def waited(seen, **seconds):
    return replace(seen, since={job: Since(seen.now_s - s, seen.now_s - s) for job, s in seconds.items()})


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_that_has_waited_long_enough_goes_before_a_later_one_of_higher_priority(w, policy):
    jobs = [w.job("old", number=1), w.job("high", number=2, priority=2)]
    seen = waited(w.snapshot([w.devices("a")], jobs, policy=policy), old=250.0, high=1.0)
    assert [s.job for s in plan(seen).start] == ["high"]
    assert [s.job for s in plan(replace(seen, ageing_s=50.0)).start] == ["old"]
    assert [s.job for s in plan(replace(seen, ageing_s=200.0)).start] == ["high"]


def test_among_those_of_a_tier_the_first_that_came_is_first_also_if_it_has_aged_into_it(w):
    jobs = [w.job("old", number=1), w.job("high", number=2, priority=2)]
    seen = waited(w.snapshot([w.devices("a")], jobs, ageing_s=100.0), old=250.0)
    assert [s.job for s in plan(seen).start] == ["old"]


def test_no_job_ages_beyond_the_highest_priority(w):
    job = w.job("old", priority=998)
    seen = waited(w.snapshot([], [job], ageing_s=1.0), old=10.5)
    assert (tier(job, seen), tier(job, replace(seen, ageing_s=8.0))) == (1000, 999)
    assert tier(job, replace(seen, ageing_s=0.0)) == 998


@pytest.mark.parametrize("policy", POLICIES)
def test_an_aged_job_stops_only_attempts_below_its_own_priority(w, policy):
    node = w.devices("a", 1, free=())
    running = w.running("r", (node.id, (0,)), priority=1)
    seen = w.snapshot([node], [w.job("old", priority=1)], [running], policy=policy, ageing_s=1.0)
    assert not plan(waited(seen, old=50.0), full=True).preempt
    lower = replace(seen, running=(replace(running, priority=0),))
    assert [p.victim for p in plan(waited(lower, old=50.0), full=True).preempt] == ["r"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_job_had_aged_when_it_was_placed_stays_while_it_runs(w, policy):
    node, old = w.devices("a", 1), w.job("old", number=1)
    seen = waited(w.snapshot([node], [old], policy=policy, ageing_s=100.0), old=250.0)
    [start] = plan(seen).start
    assert start.aged == 2
    events = fold.submitted(old, {}, 0.0), fold.placed(old, start, node.kind, node.pool, 1.0)
    [running] = fold.running(fold.fold(events).values())
    assert running.priority == 2
    between, above = w.job("between", number=2, priority=1), w.job("above", number=3, priority=3)
    busy = replace(seen, devices=(replace(node, free=()),), running=(running,), since={})
    assert not plan(replace(busy, jobs=(between,)), full=True).preempt
    assert [p.victim for p in plan(replace(busy, jobs=(above,)), full=True).preempt] == ["old"]


def test_a_log_without_it_says_that_nothing_had_aged(w):
    old = w.job("old", number=1)
    [start] = plan(w.snapshot([w.devices("a", 1)], [old])).start
    event = fold.placed(old, start, "nvidia:H100-80GB", "p", 1.0)
    assert "aged" not in event.data
    assert fold.fold([fold.submitted(old, {}, 0.0), event])["old"].attempts[-1].aged == 0
