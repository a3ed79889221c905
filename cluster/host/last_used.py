"""Track when items were last used, to remove idle ones."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

IDLE_S = 3600.0


class LastUsed:
    """Time of last use by name, in memory and by the monotonic clock.

    An item that is older than this object counts as used when the object was created. Thread-safe.
    """

    def __init__(self) -> None:
        self._created_s = time.monotonic()
        self._used_s: dict[str, float] = {}
        self._lock = threading.RLock()

    def touch(self, name: str) -> None:
        with self._lock:
            self._used_s[name] = time.monotonic()

    def idle(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that were not used for IDLE_S."""
        with self._lock:
            before_s = time.monotonic() - IDLE_S
            return [name for name in names if self._used_s.get(name, self._created_s) <= before_s]

    @contextmanager
    def remove_if_idle(self, name: str) -> Iterator[bool]:
        """Yield whether `name` may be removed now.

        A thread that wants to use it waits in `touch` until this block ends.
        """
        with self._lock:
            if idle := bool(self.idle([name])):
                self._used_s.pop(name, None)
            yield idle


__all__ = ["IDLE_S", "LastUsed"]
