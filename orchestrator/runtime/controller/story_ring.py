"""The newest lines of the story of all jobs, for other threads (see core/attempt/story.py)."""

import threading
from collections import deque

from orchestrator.core.attempt.story import StoryLine

MAX_LINES = 10_000


class StoryRing:
    """Stores the last `MAX_LINES` lines in memory. Thread-safe."""

    def __init__(self, maximum: int = MAX_LINES):
        self._lock = threading.Lock()
        self._lines: deque[StoryLine] = deque(maxlen=maximum)

    def add(self, lines: list[StoryLine]) -> None:
        with self._lock:
            self._lines.extend(lines)

    def lines(self) -> list[StoryLine]:
        with self._lock:
            return list(self._lines)
