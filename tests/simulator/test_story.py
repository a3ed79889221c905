"""One story told again and again: with a crash at every named point, with messages that come twice, with clocks that
jump. Its end is always the same.
"""

import pytest

from orchestrator.runtime import crash_points
from tests.simulator.scenario import Scenario

ENDS = {
    "plain": "SUCCEEDED",
    "gang": "SUCCEEDED",
    "long": "SUCCEEDED",
    "fails": "FAILED",
    "again": "SUCCEEDED",
    "urgent": "SUCCEEDED",
    "cancelled": "CANCELLED",
    "moved": "SUCCEEDED",
    "nowhere": "FAILED",
    "grown": "SUCCEEDED",
    "cut off": "SUCCEEDED",
    "overtaken": "SUCCEEDED",
    "withheld": "SUCCEEDED",
    "probe-cpu": "SUCCEEDED",
    "probe-tpu:v5e": "SUCCEEDED",
}


class Listening(Scenario):
    def __init__(self):
        self.reached = set()
        super().__init__()

    def crashes_at(self, point):
        self.reached.add(point)
        return False


def test_the_story_reaches_every_point():
    world = Listening()
    assert world.final_states() == ENDS
    assert set(crash_points.names()) == world.reached


@pytest.mark.parametrize("point", crash_points.names())
def test_a_crash_at_any_point_leads_to_the_same_ends(point):
    world = Scenario(crash_at=point)
    assert world.final_states() == ENDS
    assert world.armed is None, "it did not crash there"


@pytest.mark.parametrize("seed", range(5))
def test_messages_that_come_twice_or_late_lead_to_the_same_ends(seed):
    assert Scenario(seed, doubled=0.5).final_states() == ENDS


def test_clocks_that_are_set_back_ten_years_and_forth_change_nothing():
    ordinary, jumping = Scenario(), Scenario(clocks=(-3.2e8, 3.2e8, -3600.0, 3600.0, -6.4e8))
    assert ordinary.final_states() == jumping.final_states() == ENDS
    told = [[(e.job, e.event, e.epoch, e.data) for e in world.store.log] for world in (ordinary, jumping)]
    assert told[0] == told[1], "the same decisions in the same order"
    assert [e.time_s for e in ordinary.store.log] != [e.time_s for e in jumping.store.log]
