"""The server's process: one per home, on loopback, gone cleanly on SIGTERM, Ctrl-C or `POST /v1/shutdown`."""

import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from cluster import tokens
from cluster.errors import Conflict, UserError
from cluster.paths import private_dir
from cluster.processes import identify
from cluster.version import VERSION
from orchestrator.server import record
from orchestrator.server.app import make_app
from orchestrator.server.facade import Facade
from orchestrator.server.record import ServerRecord
from orchestrator.server.transfers import forget_unfinished

DRAIN_S = 3


def serve(home: Path, port: int, make_service: Callable[[Path], Facade]) -> None:
    """Serve until told to end. Raises Conflict when this home has a server already, UserError when `port` is taken."""
    os.umask(0o077)
    os.environ["POLYFLEET_HOME"] = str(private_dir(home))
    with _only_one(home), listener(port) as listening:
        token = tokens.read(tokens.ensure(home / "token"))
        forget_unfinished(home)
        service = make_service(home)
        try:
            _run(service, token, home, listening)
        finally:
            record.forget(home)
            service.close()


def _run(service: Facade, token: str, home: Path, listening: socket.socket) -> None:
    app = make_app(service, token, home=home, stop=lambda: server.end())
    found = identify(os.getpid())
    answering = ServerRecord(found.pid, found.created, listening.getsockname()[1], VERSION, app.state.started_at)
    server = _Server(
        server_config(app), on_answering=lambda: record.write(home, answering), on_ending=app.state.stopping.set
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again once it has ended: these make that harmless, and serve until it has begun
        signal.signal(number, lambda *_: server.end())
    server.run(sockets=[listening])


def server_config(app: FastAPI) -> uvicorn.Config:
    """Plain HTTP/1.1 by h11, no web sockets, no trust in forwarding headers, no access log (URLs hold users' names)."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_answering: Callable[[], None], on_ending: Callable[[], None]):
        super().__init__(config)
        self._on_answering, self._on_ending = on_answering, on_ending

    def end(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_answering()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_ending()
        await super().shutdown(sockets)


@contextmanager
def _only_one(home: Path) -> Iterator[None]:
    """Held for the life of the server; the system lets go of it however the process ends."""
    with (home / "server.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"a server for {home} is running", "`polyfleet server status` shows it") from None
        yield


@contextmanager
def listener(port: int) -> Iterator[socket.socket]:
    """Listens on loopback. TCP is named because only then asyncio turns Nagle's delay off: 40 ms per answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as e:
            raise UserError(f"port {port} cannot be used: {e}", "choose another with --port, or leave it out") from None
        s.listen(128)
        yield s


def log_to_stderr() -> None:
    """Times in UTC; daemon.py sends stderr to logs/server.log."""
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)sZ %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
