"""Virtual time: a queue of actions by time.

Actions due at the same time run in the order in which they were added.
"""

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., Any]


class VirtualClock:
    """Event queue. `now_s`: time of the current action. `happened`: number of actions run."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.happened = 0
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._numbered = 0

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        self._numbered += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._numbered, action, arguments))

    def run(self, until_s: float, maximum: int) -> None:
        """Run the actions due until `until_s`, at most `maximum` of them."""
        queue, pop = self._queue, heapq.heappop
        while queue and maximum > 0 and queue[0][0] <= until_s:
            at_s, _, action, arguments = pop(queue)
            self.now_s = at_s
            self.happened += 1
            maximum -= 1
            action(*arguments)
        if maximum > 0:
            self.now_s = max(self.now_s, until_s)
