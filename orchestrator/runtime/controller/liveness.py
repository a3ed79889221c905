"""Liveness of the controller's thread: when its last cycle ended and what it does now.

Read by other threads.
"""

import logging
import time
from collections import deque

log = logging.getLogger(__name__)

MAX_REPAIRS = 50


class Liveness:
    """Liveness data. `activity`: current activity. `error`: error of the last cycle, "" if it succeeded."""

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

    def repairs(self, within_s: float) -> list[tuple[str, str, str]]:
        """Recent repairs as (time, node, sentence)."""
        recent = [r for r in list(self._repairs) if time.time() - r[0] < within_s]
        return [(time.strftime("%H:%M:%S UTC", time.gmtime(t)), node, sentence) for t, node, sentence in recent]
