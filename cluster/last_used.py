"""When each of many things was used last, so that what nobody uses any more can be removed."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

IDLE_S = 3600.0


class LastUsed:
    """By name, in memory: what was there before counts as used when this began. No change of the clock ages anything.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._used_s: dict[str, float] = {}
        self._lock = threading.RLock()

    def note(self, name: str) -> None:
        with self._lock:
            self._used_s[name] = time.monotonic()

    def idle(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that were not used for IDLE_S."""
        with self._lock:
            before_s = time.monotonic() - IDLE_S
            return [name for name in names if self._used_s.get(name, self._begun_s) <= before_s]

    @contextmanager
    def removing(self, name: str) -> Iterator[bool]:
        """Whether `name` may be removed now. Whoever wants to use it waits in `note` until that is done."""
        with self._lock:
            if idle := bool(self.idle([name])):
                self._used_s.pop(name, None)
            yield idle


__all__ = ["IDLE_S", "LastUsed"]
