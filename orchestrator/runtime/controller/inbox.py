"""What other threads share with the controller's thread: the queue of its messages, and when its last cycle ended.

Messages stay until all events that follow from them are stored.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.errors import PolyfleetError
from orchestrator.core.controller import messages as m
from orchestrator.runtime.controller.pending_request import RESULT_S, PendingRequest
from orchestrator.units import iso

log = logging.getLogger(__name__)

MAX_REPAIRS = 50


class Inbox:
    """The controller's inbox.

    Any thread may call `put` and `post_and_wait`; only the controller's thread calls the rest.

    `pending`: received items: messages, PendingRequests, and tuples from the link to Ray's cluster.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.pending: list[Any] = []

    def put(self, item: Any) -> None:
        """Add an item; None only wakes the controller."""
        self._queue.put(item)

    def post_and_wait(
        self, message: m.Message, current_activity: Callable[[], str], timeout_s: float = RESULT_S
    ) -> None:
        """Post a message and wait until its effect is durable.

        Raises NotFound or FleetError if refused, and ControllerBusy.
        """
        pending = PendingRequest(message)
        self._queue.put(pending)
        pending.wait(timeout_s, current_activity)

    def drain(self, wait_s: float, due_s: float, closing: threading.Event) -> None:
        """Wait up to `wait_s` for an item, then until `due_s` (monotonic); move all items to `pending`.

        Submissions are merged into one message.
        """
        items: list[Any] = []
        try:
            items.append(self._queue.get(timeout=wait_s))
            closing.wait(max(0.0, due_s - time.monotonic()))
            while True:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        new = tuple(record for item in items if isinstance(item, m.Submitted) for record in item.records)
        self.pending += [m.Submitted(new)] if new else []
        self.pending += [item for item in items if item is not None and not isinstance(item, m.Submitted)]

    def take_link_messages(self) -> list[tuple[Any, ...]]:
        """Remove and return the tuples from the link."""
        link_messages = [item for item in self.pending if isinstance(item, tuple)]
        self.pending = [item for item in self.pending if not isinstance(item, tuple)]
        return link_messages

    def refuse_requests(self, error: PolyfleetError) -> None:
        """Raise an error in all waiting callers; messages without a waiting caller stay for the next cycle."""
        for request in [item for item in self.pending if isinstance(item, PendingRequest)]:
            request.finish(error)
        self.pending = [item for item in self.pending if not isinstance(item, PendingRequest)]


@dataclass(frozen=True, slots=True)
class Repair:
    """A restart of a node or another part of the fleet. `repaired_at` is ISO 8601 in UTC."""

    repaired_at: str
    node: str
    message: str


class Liveness:
    """When the last cycle ended and what the thread does now, for other threads.

    `activity`: current activity. `error`: error of the last cycle, "" if it succeeded.
    """

    def __init__(self) -> None:
        self.activity, self.error, self.failures = "starting", "", 0
        self._ended_s = time.monotonic()
        self._repairs: deque[tuple[float, str, str]] = deque(maxlen=MAX_REPAIRS)

    @property
    def age_s(self) -> float:
        """Seconds since the end of the last cycle."""
        return time.monotonic() - self._ended_s

    def cycle_ended(self, error: str = "") -> None:
        self.error, self.failures = error, self.failures + 1 if error else 0
        self._ended_s = time.monotonic()

    def add_repair(self, node: str, sentence: str) -> None:
        log.warning("%s", sentence)
        self._repairs.append((time.time(), node, sentence))

    def repairs(self, within_s: float) -> list[Repair]:
        recent = [r for r in list(self._repairs) if time.time() - r[0] < within_s]
        return [Repair(iso(wall_s) or "", node, sentence) for wall_s, node, sentence in recent]
