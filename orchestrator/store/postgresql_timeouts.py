"""Connections to PostgreSQL on which no call waits for ever: a server that is stopped or hangs never answers, and the
driver has no limit of its own. Imported only where PostgreSQL is used, since psycopg may be missing.
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
    """`limit_s` is for one call, such as a statement with its whole result; None for any time it takes. Past it the
    connection is cut, which the call tells as a lost connection.
    """

    limit_s: float | None = LONGEST_S

    def wait(self, *arguments: Any, **named: Any) -> Any:
        with _waiting(self.pgconn.socket, self.limit_s):
            return super().wait(*arguments, **named)


class _Cutter(threading.Thread):
    """Looks at all calls that wait now, twice a second."""

    deadlines: ClassVar[dict[object, tuple[float, int]]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()
    now: ClassVar["_Cutter | None"] = None

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
        if _Cutter.now is None:
            _Cutter.now = _Cutter()
            _Cutter.now.start()
    try:
        yield
    finally:
        with _Cutter.lock:
            _Cutter.deadlines.pop(call, None)


def _cut(descriptor: int) -> None:
    """The call that waits on it still has it open: it leaves only with the lock that we hold."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
