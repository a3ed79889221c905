"""When the controller plans: after a change, but at most every 50 ms, and fully each `every_s`. Else every two seconds,
because time alone silences nodes, ends reservations and lets jobs age.
"""

from itertools import pairwise

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.model import Policy
from orchestrator.core.step.placement import MIN_INTERVAL_S, PLAN_EVERY_S


@pytest.fixture
def planned(c, w):
    """Tells whether a tick, so many seconds later, made a plan. Node a has one device, which a job holds."""
    c.node("a")
    c.run(w.job("first", w.want("cpu")))
    c.tick()

    def made(after_s):
        before = c.control.planned_s
        c.tell(m.Tick(policy=Policy()), after_s)
        return c.control.planned_s > before

    assert not all(made(MIN_INTERVAL_S) for _ in range(10))
    return made


def test_nothing_is_planned_without_a_change_until_time_itself_may_have_changed_something(planned):
    waited_s = MIN_INTERVAL_S
    while not planned(0.1) and waited_s < 2 * PLAN_EVERY_S:
        waited_s += 0.1
    assert waited_s == pytest.approx(PLAN_EVERY_S, abs=0.2)


def test_a_change_is_planned_at_once_and_those_that_follow_within_50_ms_together(c, w, planned):
    c.submit(w.job("second", w.want("cpu")))
    assert planned(0.001)
    c.submit(w.job("third", w.want("cpu")))
    assert not planned(0.001)
    c.submit(w.job("fourth", w.want("cpu")))
    assert not planned(0.04)
    assert planned(0.01)
    assert {"second", "third", "fourth"} <= set(c.control.plan.why_not)
    assert not planned(0.1), "nothing has changed since"


def test_between_two_full_plans_pass_as_many_seconds_as_the_fleet_file_says(c, w, planned):
    begun_s, full_s = c.control.full_plan_s, []
    for number in range(130):
        c.submit(w.job(f"j{number}", w.want("cpu")))
        c.tell(m.Tick(policy=Policy()), 1.0)
        if c.control.full_plan_s not in (begun_s, *full_s):
            full_s.append(c.control.full_plan_s)
    assert [later - earlier for earlier, later in pairwise(full_s)] == [pytest.approx(60.0, abs=1.0)]
