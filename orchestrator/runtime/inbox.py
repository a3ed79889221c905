"""What other threads tell the controller. What has come is kept until all that follows from it is stored."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from cluster.errors import PolyfleetError
from orchestrator.core import messages as m
from orchestrator.runtime.pending_request import ANSWER_S, Ask


class Inbox:
    """`put` may be called by any thread, all else but `ask` by the controller's alone. `kept` are messages, Asks, and
    what the link to Ray's cluster tells, as tuples.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.kept: list[Any] = []

    def put(self, item: Any) -> None:
        """None only wakes the controller."""
        self._queue.put(item)

    def ask(self, message: m.Message, doing: Callable[[], str], timeout_s: float = ANSWER_S) -> None:
        """Have it done; durable when this returns. Raises NotFound or FleetError as the controller refuses it, Busy."""
        asked = Ask(message)
        self._queue.put(asked)
        asked.wait(timeout_s, doing)

    def drain(self, wait_s: float, due_s: float, closing: threading.Event) -> None:
        """Keep what has come, in order, once there is something and it is `due_s`; submissions become one message."""
        items: list[Any] = []
        try:
            items.append(self._queue.get(timeout=wait_s))
            closing.wait(max(0.0, due_s - time.monotonic()))
            while True:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        new = tuple(record for item in items if isinstance(item, m.Submitted) for record in item.records)
        self.kept += [m.Submitted(new)] if new else []
        self.kept += [item for item in items if item is not None and not isinstance(item, m.Submitted)]

    def of_the_link(self) -> list[tuple[Any, ...]]:
        """No longer kept: the link has them."""
        told = [item for item in self.kept if isinstance(item, tuple)]
        self.kept = [item for item in self.kept if not isinstance(item, tuple)]
        return told

    def refuse_asks(self, error: PolyfleetError) -> None:
        """Whoever waits is told; messages that nobody waits for are taken again."""
        for ask in [item for item in self.kept if isinstance(item, Ask)]:
            ask.answer(error)
        self.kept = [item for item in self.kept if not isinstance(item, Ask)]
