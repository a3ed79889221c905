"""What takes long: a package into the home, and work on checkpoints with its progress."""

import asyncio
import hashlib
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import Request

from cluster.errors import FleetError, UserError
from cluster.paths import private_dir
from orchestrator.server.facade import Facade
from orchestrator.server.streams import HEARTBEAT_S

PIECE_BYTES = 1024 * 1024
PROGRESS_EVERY_S = 0.2
INCOMING = ".incoming-"


def forget_unfinished(home: Path) -> None:
    """Remove uploads that a server before us was receiving when it was killed; only one server of a home runs."""
    for left in (home / "packages").glob(f"{INCOMING}*"):
        left.unlink(missing_ok=True)


async def receive_package(request: Request, sha: str) -> None:
    """The body into a private file, checked against its name, then handed on. Nothing stays behind on an error."""
    service: Facade = request.app.state.service
    folder = private_dir(request.app.state.home / "packages")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=INCOMING, delete=False) as part:
        path = Path(part.name)
        try:
            received = await _store(request, part)
            if received != sha:
                raise UserError(
                    f"the package's SHA-256 is {received[:12]}…, its name says {sha[:12]}…", "send it again"
                )
            await anyio.to_thread.run_sync(service.store_package, sha, path)
        except OSError as e:
            raise FleetError(f"the package could not be stored: {e.strerror or e}", f"make room under {folder}") from e
        finally:
            path.unlink(missing_ok=True)


async def _store(request: Request, part: Any) -> str:
    digest, waiting = hashlib.sha256(), bytearray()

    def store() -> None:
        digest.update(waiting)
        part.write(waiting)
        waiting.clear()

    async for chunk in request.stream():
        waiting += chunk
        if len(waiting) >= PIECE_BYTES:
            await anyio.to_thread.run_sync(store)
    store()
    part.flush()
    return digest.hexdigest()


Progress = Callable[[int, int], None]
Work = Callable[[Facade, Progress], Any]


async def told_events(request: Request, work: Work) -> AsyncIterator[tuple[str, Any] | None]:
    """Long work in a thread, told as events: `progress` now and then, at last `report`. Raises its error."""
    service: Facade = request.app.state.service
    loop, told, gone = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Any]](), threading.Event()
    last_s = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal last_s
        if gone.is_set():  # raising into the service is how work nobody waits for is stopped
            raise FleetError("the client went away, the work was stopped", "ask again")
        if done >= total or time.monotonic() - last_s >= PROGRESS_EVERY_S:
            last_s = time.monotonic()
            loop.call_soon_threadsafe(told.put_nowait, ("progress", {"done_bytes": done, "total_bytes": total}))

    def run() -> None:
        item: tuple[str, Any]
        try:
            item = ("report", work(service, tell))
        except Exception as e:
            item = ("raised", e)
        loop.call_soon_threadsafe(told.put_nowait, item)

    loop.run_in_executor(None, run)
    try:
        async for item in _taken(told):
            yield item
    finally:
        gone.set()


async def _taken(told: "asyncio.Queue[tuple[str, Any]]") -> AsyncIterator[tuple[str, Any] | None]:
    """Up to and with the report; None at each heartbeat without news."""
    while True:
        try:
            name, data = await asyncio.wait_for(told.get(), HEARTBEAT_S)
        except TimeoutError:
            yield None
            continue
        if name == "raised":
            raise data
        yield name, data
        if name == "report":
            return
