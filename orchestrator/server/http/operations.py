"""Long-running operations in threads, reported as events; each idempotency key runs its operation once.

A client that repeats a request while its operation runs follows the same operation; afterwards it gets the stored
result. An operation without a listening client is stopped.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import anyio.to_thread

from cluster.errors import Conflict, FleetError
from orchestrator.server.http.streams import HEARTBEAT_S
from orchestrator.services.service import Service

PROGRESS_EVERY_S = 0.2
MAX_RUNNING = 16
MAX_WAITING = 16
"""Operations that may wait for a thread; beyond this number a request is refused."""
STORED_RESULT = "report"
"""Key of a stored response. The job store keeps it, so it does not follow the name of the event."""
Progress = Callable[[int, int], None]
Call = Callable[[Progress], Any]
Item = tuple[str, Any]


class OperationLimitExceeded(FleetError):
    """The server has its maximum number of running and waiting operations."""

    retry_after_s = 10

    def __init__(self, maximum: int):
        super().__init__(
            f"the server has its maximum of {maximum} running and waiting operations on checkpoints", "retry in 10 s"
        )
        self.args = (maximum,)


class LongOperations:
    """Operations of one server, in separate threads. Belongs to one event loop; created at first use in it."""

    def __init__(self, service: Service):
        self.service = service
        self.by_key: dict[str, LongOperation] = {}
        self.count = 0
        self._threads = ThreadPoolExecutor(MAX_RUNNING, thread_name_prefix="work")

    def check_limit(self) -> None:
        """Raise OperationLimitExceeded if no further operation may start."""
        if self.count >= MAX_RUNNING + MAX_WAITING:
            raise OperationLimitExceeded(self.count)

    def begin(self, key: str, request: Any, call: Call) -> "LongOperation":
        """Start an operation. Raises OperationLimitExceeded."""
        self.check_limit()
        operation = LongOperation(self, key, request, call)
        self.count += 1
        if key:
            self.by_key[key] = operation
        self._threads.submit(operation.run)
        return operation

    def remove(self, operation: "LongOperation") -> None:
        self.count -= 1
        if self.by_key.get(operation.key) is operation:
            del self.by_key[operation.key]


class LongOperation:
    """One operation. Belongs to the event loop in which it was created, except `run` and `_publish_progress`."""

    def __init__(self, operations: LongOperations, key: str, request: Any, call: Call):
        self.key, self.request = key, request
        self.abandoned = threading.Event()
        self.ended = asyncio.Event()
        self._operations, self._call = operations, call
        self._loop, self._reported_s = asyncio.get_running_loop(), 0.0
        self._listeners: list[asyncio.Queue[Item]] = []

    async def subscribe(self) -> AsyncIterator[Item | None]:
        """Yield events up to and including the result, and None at each heartbeat. Raises the operation's error."""
        queue: asyncio.Queue[Item] = asyncio.Queue()
        self._listeners.append(queue)
        try:
            async for item in _queued_items(queue):
                yield item
        finally:
            self._listeners.remove(queue)
            if not self._listeners:
                self.abandoned.set()

    def run(self) -> None:
        """Run the operation, unless its client disconnected while it waited for a thread."""
        item: Item
        try:
            self._check_abandoned()
            item = ("result", self._result())
        except Exception as e:
            item = ("raised", e)
        with suppress(RuntimeError):  # the server has stopped, and its event loop with it
            self._loop.call_soon_threadsafe(self._finish, item)

    def _result(self) -> Any:
        """Stored result of the key, else result of the call. Of two operations with one key, only one runs it."""
        if not self.key:
            return self._call(self._publish_progress)
        service = self._operations.service
        stored = service.stored_response(self.key, self.request)
        if stored is None:
            response = {STORED_RESULT: self._call(self._publish_progress)}
            stored = service.store_response(self.key, self.request, response)
        return stored[STORED_RESULT]

    def _check_abandoned(self) -> None:
        """Stop an operation without clients, by raising an error from its progress callback."""
        if self.abandoned.is_set():
            raise FleetError("the client disconnected, so the operation was stopped", "run the command again")

    def _publish_progress(self, done: int, total: int) -> None:
        self._check_abandoned()
        if done >= total or time.monotonic() - self._reported_s >= PROGRESS_EVERY_S:
            self._reported_s = time.monotonic()
            item = ("progress", {"done_bytes": done, "total_bytes": total})
            self._loop.call_soon_threadsafe(self._notify_listeners, item)

    def _notify_listeners(self, item: Item) -> None:
        for queue in self._listeners:
            queue.put_nowait(item)

    def _finish(self, item: Item) -> None:
        self._operations.remove(self)
        self._notify_listeners(item)
        self.ended.set()


def stream_operation(operations: LongOperations, key: str, request: Any, call: Call) -> AsyncIterator[Item | None]:
    """Yield the events of `call`: `progress` from time to time, then `result`. Raises its error, and Conflict for a key
    that was used with another request; OperationLimitExceeded before the stream begins, so that the HTTP status can
    still be set.
    """
    if key not in operations.by_key:
        operations.check_limit()
    return _stream_once(operations, key, request, call)


async def _stream_once(operations: LongOperations, key: str, request: Any, call: Call) -> AsyncIterator[Item | None]:
    if not key:
        async for item in operations.begin(key, request, call).subscribe():
            yield item
        return
    stored = await anyio.to_thread.run_sync(operations.service.stored_response, key, request)
    if stored is not None:  # needs no thread of the operations
        yield "result", stored[STORED_RESULT]
        return
    while (operation := operations.by_key.get(key)) is not None and operation.abandoned.is_set():
        async for beat in _heartbeats_until(operation.ended):
            yield beat
    if operation is not None and operation.request != request:
        raise Conflict(f"the idempotency key {key[:40]!r} was used with another request", "use a new key")
    async for item in (operation or operations.begin(key, request, call)).subscribe():
        yield item


async def _heartbeats_until(over: asyncio.Event) -> AsyncIterator[None]:
    """Wait until `over` is set; yield None at each heartbeat."""
    while not over.is_set():
        try:
            await asyncio.wait_for(over.wait(), HEARTBEAT_S)
        except TimeoutError:
            yield None


async def _queued_items(queue: "asyncio.Queue[Item]") -> AsyncIterator[Item | None]:
    while True:
        try:
            name, data = await asyncio.wait_for(queue.get(), HEARTBEAT_S)
        except TimeoutError:
            yield None
            continue
        if name == "raised":
            raise data
        yield name, data
        if name == "result":
            return
