"""Process of the server: one per home, on its Unix socket and, on request, a loopback port.

It stops cleanly on SIGTERM, Ctrl-C or `POST /v1/shutdown`.
"""

import fcntl
import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio.to_thread
import uvicorn
from fastapi import FastAPI

from cluster.errors import Conflict, UserError
from cluster.host import tokens
from cluster.host.processes import identify
from cluster.paths import private_dir
from cluster.version import VERSION
from orchestrator.home import server_record, token, unix_socket
from orchestrator.home.server_record import ServerRecord
from orchestrator.server.app import make_app
from orchestrator.server.connection_limits import BACKLOG, MAX_ACCEPTED, make_protocol, raise_file_limit
from orchestrator.server.http.archive_upload import remove_partial_uploads
from orchestrator.services.service import Service

DRAIN_S = 3
GC_THRESHOLD = 20_000
"""New objects until the next garbage collection; Python's default is 700."""
REQUEST_THREADS = 64
"""Requests that wait for the store are written in one transaction, so more of them do not cost more."""


def serve(home: Path, port: int | None, make_service: Callable[[Path], Service]) -> None:
    """Serve until stopped: on the home's Unix socket, and on a TCP port unless `port` is None (0: any free port).

    Raises Conflict if this home already has a server, UserError if `port` is in use or the token is invalid.
    """
    os.umask(0o077)
    os.environ["POLYFLEET_HOME"] = str(private_dir(home))
    raise_file_limit()
    with ExitStack() as resources:
        resources.enter_context(_server_lock(home))
        tokens.rotate(home / token.NAME)
        secret = token.read(home)
        listening, path = resources.enter_context(unix_socket.listener(home))
        tcp = [] if port is None else [resources.enter_context(listener(port))]
        remove_partial_uploads(home)
        with server_record.startup_status(home):
            service = make_service(home)
        _reduce_garbage_collection()
        try:
            _run(service, secret, home, path, [listening, *tcp])
        finally:
            server_record.remove(home)
            path.unlink(missing_ok=True)  # before closing, which may take so long that this process is killed
            service.close()


def _run(service: Service, token: str, home: Path, path: Path, listening: list[socket.socket]) -> None:
    app = make_app(service, token, home=home, stop=lambda: server.end())
    process = identify(os.getpid())
    port = next((s.getsockname()[1] for s in listening if s.family == socket.AF_INET), 0)
    record = ServerRecord(process.pid, process.created, port, VERSION, app.state.hub.started_at, str(path))
    server = _Server(
        server_config(app), on_ready=lambda: server_record.write(home, record), on_ending=app.state.stopping.set
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again when it has stopped: these handlers make that harmless. They also handle
        # signals before uvicorn has started.
        signal.signal(number, lambda *_: server.end())
    server.run(sockets=listening)


def _reduce_garbage_collection() -> None:
    """Collect garbage less often. Records of jobs stay in memory: searching them for garbage took a fifth of the
    server's time while 4,000 jobs were submitted, and paused it for up to 0.27 s.
    """
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def server_config(app: FastAPI) -> uvicorn.Config:
    """Plain HTTP/1.1, no web sockets, no forwarding headers, no access log (URLs contain names that users chose)."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=make_protocol(),
        backlog=MAX_ACCEPTED,
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], on_ending: Callable[[], None]):
        super().__init__(config)
        self._on_ready, self._on_ending = on_ready, on_ending

    def end(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        anyio.to_thread.current_default_thread_limiter().total_tokens = REQUEST_THREADS
        for listening in sockets or ():
            listening.listen(BACKLOG)  # uvicorn's backlog also sets how many asyncio accepts at once
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_ending()
        await super().shutdown(sockets)


@contextmanager
def _server_lock(home: Path) -> Iterator[None]:
    """Lock the home for the lifetime of the server; the system releases the lock however the process ends."""
    with (home / "server.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"a server for {home} is running", "`polyfleet server status` shows it") from None
        yield


@contextmanager
def listener(port: int) -> Iterator[socket.socket]:
    """Listen on loopback. IPPROTO_TCP is explicit, since only then asyncio disables Nagle's delay: 40 ms a response."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as e:
            raise UserError(f"port {port} cannot be used: {e}", "choose another with --port, or leave it out") from None
        s.listen(128)
        yield s
