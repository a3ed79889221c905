"""Connections to PostgreSQL with a time limit for each call: a stopped or hanging server never responds, and the driver
has no time limit. Imported only if PostgreSQL is used, since psycopg may be missing.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import psycopg

CHECK_S = 0.5
MAX_WAIT_S = 60.0


class TimeLimitedConnection(psycopg.Connection[Any]):
    """Connection with a limit in seconds for each call, such as a statement with its complete result (None: no limit).
    After it the connection is shut down, which the call raises as a lost connection.
    """

    limit_s: float | None = MAX_WAIT_S

    def wait(self, *arguments: Any, **kwargs: Any) -> Any:
        with _time_limit(self.pgconn.socket, self.limit_s):
            return super().wait(*arguments, **kwargs)


class _DeadlineThread(threading.Thread):
    """Thread that checks the deadlines of all waiting calls twice a second."""

    deadlines: ClassVar[dict[object, tuple[float, int]]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()
    running: ClassVar["_DeadlineThread | None"] = None

    def __init__(self) -> None:
        super().__init__(name="store-patience", daemon=True)

    def run(self) -> None:
        while True:
            time.sleep(CHECK_S)
            with self.lock:
                late = [call for call, (deadline, _) in self.deadlines.items() if time.monotonic() > deadline]
                for call in late:
                    _shut_down(self.deadlines.pop(call)[1])


@contextmanager
def _time_limit(descriptor: int, limit_s: float | None) -> Iterator[None]:
    if limit_s is None:
        yield
        return
    call = object()
    with _DeadlineThread.lock:
        _DeadlineThread.deadlines[call] = (time.monotonic() + limit_s, descriptor)
        if _DeadlineThread.running is None:
            _DeadlineThread.running = _DeadlineThread()
            _DeadlineThread.running.start()
    try:
        yield
    finally:
        with _DeadlineThread.lock:
            _DeadlineThread.deadlines.pop(call, None)


def _shut_down(descriptor: int) -> None:
    """Shut a connection down. Its descriptor is still open: the call can only return with the lock held here."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
