"""server.json: where this home's server listens. Written once it answers, removed when it ends."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.paths import write_private
from cluster.processes import ProcessId

NAME = "server.json"
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


def forget(home: Path) -> None:
    (home / NAME).unlink(missing_ok=True)
