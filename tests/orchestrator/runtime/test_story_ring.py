"""The server keeps the newest lines of the story in memory."""

from orchestrator.core.attempt.story import note
from orchestrator.runtime.controller.story_ring import StoryRing


def test_only_the_newest_lines_are_kept_in_order():
    ring = StoryRing(3)
    for number in range(5):
        ring.add([note(str(number), 0.0)])
    assert [line.text for line in ring.lines()] == ["2", "3", "4"]
