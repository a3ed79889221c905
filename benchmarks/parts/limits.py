"""What the machine itself takes, measured beside everything else: no path through us can be shorter."""

import http.client
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from parts.samples import Samples

from orchestrator.core.model import Event
from orchestrator.home import unix_socket
from orchestrator.store.events.event_store import EventStore

BLOCK = b"x" * 4096
TRUE = shutil.which("true") or "/bin/true"


def command(samples: Samples, case: str, argv: list[str], env: dict[str, str] | None = None) -> None:
    """A whole process, from before the fork until it is collected. Raises SystemExit with what it said if it fails."""
    with samples.timing(case):
        done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr.decode()[-2000:]}")


def cases(samples: Samples, folder: Path, socket: Path, store: EventStore) -> list[Callable[[], None]]:
    """`folder` and `store` lie on the disk to be measured; `socket` is the server's."""
    return [
        lambda: command(samples, "limit.exec", [TRUE]),
        lambda: command(samples, "limit.python", [sys.executable, "-c", "pass"]),
        lambda: _fsync(samples, folder / "block"),
        lambda: _event(samples, store),
        lambda: _http(samples, socket),
    ]


def _fsync(samples: Samples, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, BLOCK)
    with samples.timing("limit.fsync"):
        os.fsync(descriptor)
    os.close(descriptor)


def _event(samples: Samples, store: EventStore) -> None:
    with samples.timing("limit.event"):
        store.append([Event("job", "started", 1, time.time(), {})])


def _http(samples: Samples, socket: Path) -> None:
    with samples.timing("limit.http"):
        connection = http.client.HTTPConnection("localhost")
        connection.sock = unix_socket.connect(socket, timeout_s=10)
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        connection.close()
