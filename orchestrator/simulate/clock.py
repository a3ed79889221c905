"""Virtual time: what happens next, and when. The same seed gives the same order."""

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., Any]


class VirtualClock:
    """`now_s` is the time of what happens now; `happened` counts what did."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.happened = 0
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._numbered = 0

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        self._numbered += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._numbered, action, arguments))

    def run(self, until_s: float, most: int) -> None:
        """What is due before `until_s`, but not more than `most` of it."""
        queue, pop = self._queue, heapq.heappop
        while queue and most > 0 and queue[0][0] <= until_s:
            at_s, _, action, arguments = pop(queue)
            self.now_s = at_s
            self.happened += 1
            most -= 1
            action(*arguments)
        if most > 0:
            self.now_s = max(self.now_s, until_s)
