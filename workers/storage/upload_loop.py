"""The thread of a node that uploads to its pool's object store: what is pending, and when it tries again."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable

from cluster.types import Finding

log = logging.getLogger(__name__)

POLL_EVERY_S = 2.0
MAX_RETRY_S = 300.0
PAUSE_FACTOR = 20.0
"""Pause after a search of the disk, as a multiple of its duration."""
REMEDY = "check the node's network, its credentials for the store, and that the store's library is installed there"


class UploadLoop(ABC):
    """Calls `upload_due` again and again. `what` is uploaded, as messages name it, such as "checkpoints"."""

    uri: str

    def __init__(self, what: str):
        self._what, self._problem = what, ""
        self._retry_s: dict[Hashable, tuple[float, float]] = {}
        self._request, self._pending = object(), 0
        self._counted: object | None = None
        self._wake = threading.Event()

    @property
    def pending_uploads(self) -> int:
        """Number of uploads that are not complete; at least 1 until those of attempts that have ended are counted."""
        return self._pending if self._counted is self._request else max(1, self._pending)

    def search_now(self) -> None:
        """Search for new uploads without a pause: an attempt has ended."""
        self._request = object()
        self._wake.set()

    def start(self) -> None:
        """Start the thread that uploads."""
        threading.Thread(target=self._run_loop, name=f"uploads of {self._what}", daemon=True).start()

    def findings(self) -> tuple[Finding, ...]:
        """A finding while uploads fail."""
        problem = self._problem
        return (Finding("warning", "storage", problem, REMEDY),) if problem else ()

    @abstractmethod
    def upload_due(self) -> float:
        """Upload what is not in the store. Returns the seconds that the search on this node took.

        Implementations call `_set_pending`, and try again what failed when `_may_try` allows it.
        """

    def _run_loop(self) -> None:
        while True:
            try:
                pause_s = max(POLL_EVERY_S, PAUSE_FACTOR * self.upload_due())
            except Exception as e:  # the thread must not end
                log.exception("%s were not uploaded to %s", self._what, self.uri)
                self._problem = self._problem_text(type(e).__name__)
                pause_s = MAX_RETRY_S
            self._wake.wait(pause_s)
            self._wake.clear()

    def _set_pending(self, count: int, request: object) -> None:
        """Set the number of pending uploads. `request` is the value of `_request` when the search for them began."""
        self._pending, self._counted = count, request

    def _may_try(self, key: Hashable) -> bool:
        """Return False for a pause after `key` failed."""
        return time.monotonic() >= self._retry_s.get(key, (0.0, 0.0))[0]

    def _postpone(self, key: Hashable) -> None:
        """Pause after a failure of `key`, for longer each time."""
        pause_s = self._retry_s.get(key, (0.0, POLL_EVERY_S))[1]
        self._retry_s[key] = time.monotonic() + pause_s, min(2 * pause_s, MAX_RETRY_S)

    def _problem_text(self, reason: str, verb: str = "uploaded to") -> str:
        return f"{self._what} are not {verb} {self.uri}: {reason}"
