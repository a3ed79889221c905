"""One story told again and again: with a crash at every named point, with messages that come twice, with clocks that
jump. Its end is always the same.
"""

from itertools import pairwise

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
ONCE = (
    *("event:migrated", "event:renamed", "event:replicated", "event:drained"),
    *("command:RestartAgent", "command:Reject"),
)
"""After a crash before these, the story does not come there again: a request is lost, or what led to it is over."""
POINTS = crash_points.names()
SINGLE = [(point,) for point in POINTS if point.rpartition(":")[0] in ONCE]
PAIRS = [pair for pair in pairwise(POINTS) if pair[1].removesuffix(":after") == pair[0].removesuffix(":before")]
CRASHES = SINGLE + [pair for pair in PAIRS if not {(point,) for point in pair} & set(SINGLE)]


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


class Crashing(Scenario):
    """Crashes at each of these points, one after the other, when it comes there first."""

    def __init__(self, points):
        self.left = list(points)
        super().__init__()

    def crashes_at(self, point):
        if not self.left or point != self.left[0]:
            return False
        self.left.pop(0)
        return True


def test_there_is_a_story_with_a_crash_at_every_point():
    assert sorted(point for points in CRASHES for point in points) == sorted(POINTS)


@pytest.mark.parametrize("points", CRASHES, ids=" ".join)
def test_crashes_at_any_point_lead_to_the_same_ends(points):
    """Mostly before and after the same: the story comes there again once the server is back."""
    world = Crashing(points)
    assert world.final_states() == ENDS
    assert not world.left, f"it did not crash at {world.left[0]}"


@pytest.mark.parametrize("seed", range(5))
def test_messages_that_come_twice_or_late_lead_to_the_same_ends(seed):
    assert Scenario(seed, doubled=0.5).final_states() == ENDS


def test_clocks_that_are_set_back_ten_years_and_forth_change_nothing():
    ordinary, jumping = Scenario(), Scenario(clocks=(-3.2e8, 3.2e8, -3600.0, 3600.0, -6.4e8))
    assert ordinary.final_states() == jumping.final_states() == ENDS
    told = [[(e.job, e.event, e.epoch, e.data) for e in world.store.log] for world in (ordinary, jumping)]
    assert told[0] == told[1], "the same decisions in the same order"
    assert [e.time_s for e in ordinary.store.log] != [e.time_s for e in jumping.store.log]
