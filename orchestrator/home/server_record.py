"""server.json: the address of this home's server, written when it is ready and removed when it stops.
server-doing.json: its current step during a long startup.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.host.processes import ProcessId, identify
from cluster.paths import write_private

NAME = "server.json"
STARTUP_FILE = "server-doing.json"
STARTUP_LOGGER = "orchestrator.store.upgrade"
"""Logger to which a store writes steps that may take minutes while it is opened."""
KINDS = {"pid": int, "created": str | int | float, "port": int, "version": str, "started_at": str, "socket": str}
UNIX = "unix:"
"""Prefix of the address of a Unix socket; other addresses are URLs."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """Content of server.json. `created` is the process's start as in ProcessId: a reused pid has another one.
    `started_at` is ISO 8601, UTC.

    `port` 0: no TCP port.
    """

    pid: int
    created: str | float
    port: int
    version: str
    started_at: str
    socket: str

    @property
    def url(self) -> str:
        """URL of the TCP port; "" without one."""
        return f"http://127.0.0.1:{self.port}" if self.port else ""

    @property
    def address(self) -> str:
        """Address for clients of this machine."""
        return f"{UNIX}{self.socket}"

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.created)


def read(home: Path) -> ServerRecord | None:
    """Read the record; None if it is missing or invalid. `daemon.find_server` also checks that the server runs."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        record = ServerRecord(**json.loads((home / NAME).read_text()))
        if all(isinstance(getattr(record, name), kind) for name, kind in KINDS.items()) and record.pid > 0:
            return record
    return None


def write(home: Path, record: ServerRecord) -> None:
    write_private(home / NAME, json.dumps(asdict(record)))


def remove(home: Path) -> None:
    (home / NAME).unlink(missing_ok=True)


class _StartupHandler(logging.Handler):
    def __init__(self, home: Path):
        super().__init__(logging.INFO)
        self._home, self._process = home, identify(os.getpid())

    def emit(self, log_record: logging.LogRecord) -> None:
        status = {"pid": self._process.pid, "created": self._process.created, "doing": log_record.getMessage()}
        with suppress(OSError):  # the disk may be full; the startup step itself raises that error
            write_private(self._home / STARTUP_FILE, json.dumps(status))


@contextmanager
def startup_status(home: Path) -> Iterator[None]:
    """Write the store's startup steps to a file, so that the process that started this one can show them."""
    logger, handler = logging.getLogger(STARTUP_LOGGER), _StartupHandler(home)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        (home / STARTUP_FILE).unlink(missing_ok=True)


def read_startup_status(home: Path) -> tuple[ProcessId, str] | None:
    """The process that is becoming the server, and its current step. The process may have ended."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        status = json.loads((home / STARTUP_FILE).read_text())
        return ProcessId(int(status["pid"]), status["created"]), str(status["doing"])
    return None
