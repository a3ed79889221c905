"""Long work on request, in a thread, told as events: once for each key, however often it is asked for.

Who asks again while it runs hears of the same work; who asks afterwards gets the report that was given. It is stopped
when nobody listens any more.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import anyio.to_thread
from fastapi import Request

from cluster.errors import Conflict, FleetError
from orchestrator.server.service_protocol import ServiceProtocol
from orchestrator.server.streams import HEARTBEAT_S

PROGRESS_EVERY_S = 0.2
AT_ONCE = 16
MOST_WAITING = 16
"""Works that wait for one of those threads; beyond it a request is refused."""
Progress = Callable[[int, int], None]
Call = Callable[[ServiceProtocol, Progress], Any]
Item = tuple[str, Any]


class OperationLimitExceeded(FleetError):
    """As many are under way or wait as the server takes."""

    retry_after_s = 10

    def __init__(self, most: int):
        super().__init__(f"{most} copies and checks of checkpoints are under way or wait", "ask again in 10 s")
        self.args = (most,)


class LongOperations:
    """Those of one server, in threads of their own. Belongs to one event loop; made on first use in it."""

    def __init__(self, service: ServiceProtocol):
        self.service = service
        self.by_key: dict[str, LongOperation] = {}
        self.count = 0
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="work")

    def refuse_crowd(self) -> None:
        """Raises OperationLimitExceeded."""
        if self.count >= AT_ONCE + MOST_WAITING:
            raise OperationLimitExceeded(self.count)

    def begin(self, key: str, asked: Any, call: Call) -> "LongOperation":
        """Raises OperationLimitExceeded."""
        self.refuse_crowd()
        work = LongOperation(self, key, asked, call)
        self.count += 1
        if key:
            self.by_key[key] = work
        self._threads.submit(work.run)
        return work

    def ended(self, work: "LongOperation") -> None:
        self.count -= 1
        if self.by_key.get(work.key) is work:
            del self.by_key[work.key]


class LongOperation:
    """One piece of work under way. Belongs to the event loop it was made in, but for `run` and `_tell`."""

    def __init__(self, works: LongOperations, key: str, asked: Any, call: Call):
        self.key, self.asked = key, asked
        self.abandoned = threading.Event()
        self.over = asyncio.Event()
        self._works, self._call = works, call
        self._loop, self._told_s = asyncio.get_running_loop(), 0.0
        self._listeners: list[asyncio.Queue[Item]] = []

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

    def run(self) -> None:
        """Whoever asked may have left while it waited for a thread: then nothing is begun."""
        item: Item
        try:
            self._refuse_abandoned()
            item = ("report", self._report(self._works.service))
        except Exception as e:
            item = ("raised", e)
        with suppress(RuntimeError):  # the server has ended, and its loop with it
            self._loop.call_soon_threadsafe(self._ended, item)

    def _report(self, service: ServiceProtocol) -> Any:
        """What was answered to its key before, else what the call gives: of two works with one key one makes it."""
        if not self.key:
            return self._call(service, self._tell)
        known = service.answered(self.key, self.asked)
        return (known or service.answer(self.key, self.asked, {"report": self._call(service, self._tell)}))["report"]

    def _refuse_abandoned(self) -> None:
        """Raising into the service is how work nobody waits for is stopped."""
        if self.abandoned.is_set():
            raise FleetError("the client disconnected, so the operation was stopped", "run the command again")

    def _tell(self, done: int, total: int) -> None:
        self._refuse_abandoned()
        if done >= total or time.monotonic() - self._told_s >= PROGRESS_EVERY_S:
            self._told_s = time.monotonic()
            item = ("progress", {"done_bytes": done, "total_bytes": total})
            self._loop.call_soon_threadsafe(self._spread, item)

    def _spread(self, item: Item) -> None:
        for told in self._listeners:
            told.put_nowait(item)

    def _ended(self, item: Item) -> None:
        self._works.ended(self)
        self._spread(item)
        self.over.set()


def works(request: Request) -> LongOperations:
    state = request.app.state
    if state.works is None:
        state.works = LongOperations(state.service)
    found: LongOperations = state.works
    return found


def stream_operation(request: Request, key: str, asked: Any, call: Call) -> AsyncIterator[Item | None]:
    """The events of `call`: `progress` now and then, at last `report`. Raises its error, Conflict for a key that was
    used for something else; OperationLimitExceeded at once, while a status can still be sent.
    """
    found = works(request)
    if key not in found.by_key:
        found.refuse_crowd()
    return _told_once(found, key, asked, call)


async def _told_once(works: LongOperations, key: str, asked: Any, call: Call) -> AsyncIterator[Item | None]:
    if not key:
        async for item in works.begin(key, asked, call).listen():
            yield item
        return
    known = await anyio.to_thread.run_sync(works.service.answered, key, asked)
    if known is not None:  # without a thread of the works
        yield "report", known["report"]
        return
    while (work := works.by_key.get(key)) is not None and work.abandoned.is_set():
        async for beat in _until(work.over):
            yield beat
    if work is not None and work.asked != asked:
        raise Conflict(f"the idempotency key {key[:40]!r} was used with another request", "use a new key")
    async for item in (work or works.begin(key, asked, call)).listen():
        yield item


async def _until(over: asyncio.Event) -> AsyncIterator[None]:
    """None at each heartbeat."""
    while not over.is_set():
        try:
            await asyncio.wait_for(over.wait(), HEARTBEAT_S)
        except TimeoutError:
            yield None


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
