"""Connections to PostgreSQL with a time limit for each call: a stopped or hanging server never answers, and the driver
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

LOOK_S = 0.5
LONGEST_S = 60.0


class TimeLimitedConnection(psycopg.Connection[Any]):
    """Connection with a limit in seconds for each call, such as a statement with its complete result (None: no limit).
    After it the connection is shut down, which the call reports as a lost connection.
    """

    limit_s: float | None = LONGEST_S

    def wait(self, *arguments: Any, **kwargs: Any) -> Any:
        with _waiting(self.pgconn.socket, self.limit_s):
            return super().wait(*arguments, **kwargs)


class _Cutter(threading.Thread):
    """Thread that checks the deadlines of all waiting calls twice a second."""

    deadlines: ClassVar[dict[object, tuple[float, int]]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()
    running: ClassVar["_Cutter | None"] = None

    def __init__(self) -> None:
        super().__init__(name="store-patience", daemon=True)

    def run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self.lock:
                late = [call for call, (deadline, _) in self.deadlines.items() if time.monotonic() > deadline]
                for call in late:
                    _cut(self.deadlines.pop(call)[1])


@contextmanager
def _waiting(descriptor: int, limit_s: float | None) -> Iterator[None]:
    if limit_s is None:
        yield
        return
    call = object()
    with _Cutter.lock:
        _Cutter.deadlines[call] = (time.monotonic() + limit_s, descriptor)
        if _Cutter.running is None:
            _Cutter.running = _Cutter()
            _Cutter.running.start()
    try:
        yield
    finally:
        with _Cutter.lock:
            _Cutter.deadlines.pop(call, None)


def _cut(descriptor: int) -> None:
    """Shut a connection down. Its descriptor is still open: the call can only return with the lock held here."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
