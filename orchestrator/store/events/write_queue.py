"""What waits for the store's writer: units of work, for which callers wait, and metrics, for which no caller waits."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from orchestrator.store.events.unit_of_work import Row, UnitOfWork

MAX_GROUP_EVENTS = 512
"""Number of events after which a transaction contains no further unit of work."""

METRICS_PER_WRITE = 5000
MAX_METRICS_WAITING = 100_000
METRICS_PAUSE_S = 0.2
"""Seconds that metrics wait for others, or for a durable unit, to be written with."""


class WriteQueue:
    """Thread-safe; first in, first out. The number of rows of metrics that were dropped, because too many waited, is
    `metrics_dropped`.
    """

    def __init__(self) -> None:
        self.metrics_dropped = 0
        self._changed = threading.Condition()
        self._units: deque[UnitOfWork] = deque()
        self._metrics: deque[Row] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Number of units that wait."""
        return len(self._units)

    def add(self, units: Sequence[UnitOfWork]) -> bool:
        """Add units, unless the queue is closed. Return whether they were added."""
        with self._changed:
            if not self._closed:
                self._units.extend(units)
                self._changed.notify()
            return not self._closed

    def add_metrics(self, row: Row) -> None:
        """Add the metrics of one step; if too many wait, the oldest are dropped."""
        with self._changed:
            if len(self._metrics) >= MAX_METRICS_WAITING:
                self._metrics.popleft()
                self.metrics_dropped += 1
            self._metrics.append(row)
            self._changed.notify()

    def take(self) -> tuple[list[UnitOfWork], list[Row]] | None:
        """Wait for units and metrics; remove those to write next. None when the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._units or self._metrics or self._closed)
            if not self._units and not self._closed:
                self._changed.wait_for(lambda: self._units or self._closed, METRICS_PAUSE_S)
            units = list(self._next_units())
            waiting = len(self._metrics)  # a unit is written with all metrics that were queued before it
            metrics = [self._metrics.popleft() for _ in range(waiting if units else min(METRICS_PER_WRITE, waiting))]
        return (units, metrics) if units or metrics else None

    def take_units(self) -> list[UnitOfWork]:
        """Remove all units that wait."""
        with self._changed:
            waiting, self._units = list(self._units), deque()
        return waiting

    def withdraw(self, units: Sequence[UnitOfWork]) -> list[UnitOfWork]:
        """Remove those of `units` that still wait, and return them."""
        identities = {id(unit) for unit in units}
        with self._changed:
            late = [unit for unit in self._units if id(unit) in identities]
            self._units = deque(unit for unit in self._units if id(unit) not in identities)
        return late

    def close(self) -> None:
        """Accept no further units. `take` still returns those that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _next_units(self) -> Iterator[UnitOfWork]:
        count = 0
        while self._units and count < MAX_GROUP_EVENTS:
            unit = self._units.popleft()
            count += max(1, len(unit.events))
            yield unit
