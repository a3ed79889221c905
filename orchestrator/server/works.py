"""Long work on request, in a thread, told as events: once for each key, however often it is asked for.

Who asks again while it runs hears of the same work; who asks afterwards gets the report that was given. It is stopped
when nobody listens any more.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio.to_thread
from fastapi import Request

from cluster.errors import Conflict, FleetError
from orchestrator.server.facade import Facade
from orchestrator.server.streams import HEARTBEAT_S

PROGRESS_EVERY_S = 0.2
Progress = Callable[[int, int], None]
Call = Callable[[Facade, Progress], Any]
Item = tuple[str, Any]


class Work:
    """One piece of work under way. Belongs to the event loop it was made in, but for `_run` and `_tell`."""

    def __init__(self, service: Facade, key: str, asked: Any, call: Call):
        self.asked = asked
        self.abandoned = threading.Event()
        self.over = asyncio.Event()
        self._service, self._key, self._call = service, key, call
        self._loop, self._told_s = asyncio.get_running_loop(), 0.0
        self._listeners: list[asyncio.Queue[Item]] = []
        self._loop.run_in_executor(None, self._run)

    async def listen(self) -> AsyncIterator[Item | None]:
        """Up to and with the report; None at each heartbeat without news. Raises the error of the work."""
        told: asyncio.Queue[Item] = asyncio.Queue()
        self._listeners.append(told)
        try:
            async for item in _taken(told):
                yield item
        finally:
            self._listeners.remove(told)
            if not self._listeners:
                self.abandoned.set()

    def _run(self) -> None:
        item: Item
        try:
            report = self._call(self._service, self._tell)
            if self._key:
                self._service.answer(self._key, self.asked, {"report": report})
            item = ("report", report)
        except Exception as e:
            item = ("raised", e)
        self._loop.call_soon_threadsafe(self._ended, item)

    def _tell(self, done: int, total: int) -> None:
        if self.abandoned.is_set():  # raising into the service is how work nobody waits for is stopped
            raise FleetError("the client went away, the work was stopped", "ask again")
        if done >= total or time.monotonic() - self._told_s >= PROGRESS_EVERY_S:
            self._told_s = time.monotonic()
            item = ("progress", {"done_bytes": done, "total_bytes": total})
            self._loop.call_soon_threadsafe(self._spread, item)

    def _spread(self, item: Item) -> None:
        for told in self._listeners:
            told.put_nowait(item)

    def _ended(self, item: Item) -> None:
        self._spread(item)
        self.over.set()


async def told_once(request: Request, key: str, asked: Any, call: Call) -> AsyncIterator[Item | None]:
    """The events of `call`: `progress` now and then, at last `report`. Raises its error, Conflict for a key that was
    used for something else.
    """
    service: Facade = request.app.state.service
    if key:
        known = await anyio.to_thread.run_sync(service.answered, key, asked)
        if known is not None:
            yield "report", known["report"]
            return
    works: dict[str, Work] = request.app.state.works
    while (found := works.get(key)) is not None and found.abandoned.is_set():
        await found.over.wait()
        if works.get(key) is found:
            del works[key]
    if found is not None and found.asked != asked:
        raise Conflict(f"the idempotency key {key[:40]!r} was used with another request", "use a new key")
    work = found or Work(service, key, asked, call)
    if key:
        works[key] = work
    try:
        async for item in work.listen():
            yield item
    finally:
        if work.over.is_set() and works.get(key) is work:
            del works[key]


async def _taken(told: "asyncio.Queue[Item]") -> AsyncIterator[Item | None]:
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
