"""server.json: where this home's server listens. Written once it answers, removed when it ends. server-doing.json: what
takes it so long before that.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.paths import write_private
from cluster.processes import ProcessId, identify

NAME = "server.json"
DOING = "server-doing.json"
LONG_WORK = "orchestrator.store.upgrade"
"""The logger to which a store tells what may take minutes as it is opened."""
KINDS = {"pid": int, "created": str | int | float, "port": int, "version": str, "started_at": str, "socket": str}
UNIX = "unix:"
"""Begins the address of a Unix socket; others are URLs."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """`created` is the process's start, as in ProcessId: a recycled pid has another. `started_at` is ISO 8601, UTC.

    `port` 0: it has no TCP port. `socket` "": a server of an earlier version, which has no Unix socket.
    """

    pid: int
    created: str | float
    port: int
    version: str
    started_at: str
    socket: str = ""

    @property
    def url(self) -> str:
        """ "" without a TCP port."""
        return f"http://127.0.0.1:{self.port}" if self.port else ""

    @property
    def address(self) -> str:
        """Where clients of this machine speak to it."""
        return f"{UNIX}{self.socket}" if self.socket else self.url

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.created)


def read(home: Path) -> ServerRecord | None:
    """What the file says, or None when there is none or it is not ours. Whether that server lives: `daemon.find`."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        found = ServerRecord(**json.loads((home / NAME).read_text()))
        if all(isinstance(getattr(found, name), kind) for name, kind in KINDS.items()) and found.pid > 0:
            return found
    return None


def write(home: Path, record: ServerRecord) -> None:
    write_private(home / NAME, json.dumps(asdict(record)))


def remove(home: Path) -> None:
    (home / NAME).unlink(missing_ok=True)


class _Telling(logging.Handler):
    def __init__(self, home: Path):
        super().__init__(logging.INFO)
        self._home, self._process = home, identify(os.getpid())

    def emit(self, told: logging.LogRecord) -> None:
        doing = {"pid": self._process.pid, "created": self._process.created, "doing": told.getMessage()}
        with suppress(OSError):  # a full disk: the work itself tells that
            write_private(self._home / DOING, json.dumps(doing))


@contextmanager
def startup_status(home: Path) -> Iterator[None]:
    """Whoever started this process can read meanwhile what the store tells: see `doing`."""
    logger, handler = logging.getLogger(LONG_WORK), _Telling(home)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        (home / DOING).unlink(missing_ok=True)


def read_startup_status(home: Path) -> tuple[ProcessId, str] | None:
    """The process that is to be the server, and what it does first. Whether it lives still: ask."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        found = json.loads((home / DOING).read_text())
        return ProcessId(int(found["pid"]), found["created"]), str(found["doing"])
    return None
