"""server.json: where this home's server listens. Written once it answers, removed when it ends."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.paths import write_private
from cluster.processes import ProcessId

NAME = "server.json"
KINDS = {"pid": int, "created": int | float, "port": int, "version": str, "started_at": str}


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """`created` is the process's start time: with it a recycled pid is told apart. `started_at` is ISO 8601, UTC."""

    pid: int
    created: float
    port: int
    version: str
    started_at: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

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
