"""Whether the controller's thread goes on: when its last turn ended, what it does now. Read by other threads."""

import logging
import time
from collections import deque

log = logging.getLogger(__name__)

REPAIRS_KEPT = 50


class Pulse:
    """`doing` is what the turn is at; `failing` the error of the last turn, "" when it ended well."""

    def __init__(self) -> None:
        self.doing, self.failing, self.failures = "starting", "", 0
        self._ended_s = time.monotonic()
        self._repairs: deque[tuple[float, str, str]] = deque(maxlen=REPAIRS_KEPT)

    @property
    def age_s(self) -> float:
        """Since the end of the last turn."""
        return time.monotonic() - self._ended_s

    def ended(self, error: str = "") -> None:
        self.failing, self.failures = error, self.failures + 1 if error else 0
        self._ended_s = time.monotonic()

    def repaired(self, node: str, sentence: str) -> None:
        log.warning("%s", sentence)
        self._repairs.append((time.time(), node, sentence))

    def repairs(self, within_s: float) -> list[tuple[str, str, str]]:
        """(when, node, sentence) of what was started again lately."""
        recent = [r for r in list(self._repairs) if time.time() - r[0] < within_s]
        return [(time.strftime("%H:%M:%S UTC", time.gmtime(t)), node, sentence) for t, node, sentence in recent]
