"""Policies from outside: used like ours, and replaced by order where they do not work."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.fleet.policies import BUILTIN
from orchestrator.core.plan.arrays.planner_jobs import Work
from orchestrator.core.plan.assignment.decision import PriceMemory, decide
from orchestrator.core.plan.plan import plan
from orchestrator.core.plan.policies import plugins
from orchestrator.core.plan.policies.finish_time import finish_time
from orchestrator.core.plan.policies.priced_policies import POLICIES

CAPACITY = np.array([2])


def work():
    seconds = np.array([[900.0, 100.0, 500.0, 300.0]])
    return Work.of(np.array([0]), np.ones((1, 4), np.int64), seconds, np.full(4, -1))


@pytest.fixture
def known(monkeypatch):
    def made(function):
        monkeypatch.setitem(plugins.INSTALLED, "theirs", function)

    return made


def longest_first(seen):
    return seen.work.remaining_s


def raises(_seen):
    raise ZeroDivisionError("1 / 0")


def of_a_wrong_shape(_seen):
    return np.ones(3)


def with_nan(seen):
    return np.full_like(seen.work.remaining_s, np.nan)


def below_0(seen):
    return -seen.work.remaining_s


def no_numbers(_seen):
    return [["one"]]


def nothing_at_all(seen):
    return np.zeros_like(seen.work.remaining_s)


def ends_the_process(_seen):
    raise SystemExit(3)


def changes_what_it_is_shown(seen):
    seconds = seen.work.remaining_s
    seconds *= 0.001
    return seconds


def test_an_installed_policy_decides_like_one_of_ours(known):
    known(longest_first)
    found = decide(work(), CAPACITY, "theirs", PriceMemory())
    assert (found.option.tolist(), found.fault) == ([0, -1, 0, -1], "")
    known(finish_time)
    assert decide(work(), CAPACITY, "theirs", PriceMemory()).option.tolist() == [-1, 0, -1, 0]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (raises, "raised ZeroDivisionError: 1 / 0"),
        (of_a_wrong_shape, "returned an array of shape (3,), not (1, 4)"),
        (with_nan, "returned values that are not finite or below 0 for options that jobs have"),
        (below_0, "returned values that are not finite or below 0 for options that jobs have"),
        (nothing_at_all, "returned 0 for every option that jobs have"),
        (ends_the_process, "raised SystemExit: 3"),
        (changes_what_it_is_shown, "raised ValueError: output array is read-only"),
        (no_numbers, "raised ValueError: could not convert string to float: 'one'"),
    ],
)
def test_where_it_fails_the_order_of_submission_decides_and_the_fault_is_told(known, function, told):
    known(function)
    found = decide(work(), CAPACITY, "theirs", PriceMemory())
    assert (found.option.tolist(), found.fault) == ([0, 0, -1, -1], f"policy 'theirs' {told}")


def test_a_fleet_file_takes_exactly_the_policies_that_there_are():
    assert set(BUILTIN) == set(POLICIES)


def test_a_plan_tells_the_fault_of_any_tier_until_a_policy_works(known, w):
    calls = []

    def fails_at_first(seen):
        calls.append(seen)
        return raises(seen) if len(calls) == 1 else finish_time(seen)

    known(fails_at_first)
    jobs = [w.job("high", w.want("cpu"), priority=1, number=1), w.job("low", w.want("cpu"), number=2)]
    seen = replace(w.snapshot([w.cpu("a", 2)], jobs), policy="theirs")
    decided = plan(seen)
    assert {start.job for start in decided.start} == {"high", "low"}
    assert decided.memory.fault == "policy 'theirs' raised ZeroDivisionError: 1 / 0"
    assert plan(replace(seen, jobs=(), memory=decided.memory)).memory.fault == decided.memory.fault
    assert plan(replace(seen, memory=decided.memory)).memory.fault == ""
