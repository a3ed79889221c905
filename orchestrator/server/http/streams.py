"""Server-sent events as a plain streaming response, and the threads and waiting readers that feed them.

The service's methods block, so each call runs in a thread; a waiting stream holds none. Streams have a few separate
threads, so that many open logs do not delay `GET /v1/jobs`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.errors import FleetError, PolyfleetError
from orchestrator.limits import TooManyRequests
from orchestrator.server.http.responses import error_body, internal_error, status_of, to_json
from orchestrator.services.service import Service
from orchestrator.views.jobs import ChangesPage

HEARTBEAT_S = 15.0
CHANGES_WAIT_S = 2.0
STORE_WAIT_S = 0.5
"""Maximum seconds of one wait in the store, so that the next one includes clients that have joined since."""
STREAM_THREADS = 16
PAGE_THREADS = 64
SLOW_CALL_THREADS = 16
MAX_STREAMS = 512
Item = tuple[str, Any] | None
T = TypeVar("T")


class StreamLimitExceeded(FleetError):
    """The server has its maximum number of streams open."""

    retry_after_s = 10

    def __init__(self, maximum: int):
        super().__init__(
            f"the server has its maximum of {maximum} streams open", "close a `polyfleet logs -f`, or retry in 10 s"
        )
        self.args = (maximum,)


class Streams:
    """State that the streams of one server share. Belongs to one event loop; created at first use in it."""

    def __init__(self, service: Service):
        self.service = service
        self.open = self.logs = 0
        self._threads = anyio.CapacityLimiter(STREAM_THREADS)
        self._page_threads = anyio.CapacityLimiter(PAGE_THREADS)
        self._slow_call_threads = anyio.CapacityLimiter(SLOW_CALL_THREADS)
        self._reader_thread = anyio.CapacityLimiter(1)
        self._head = 0
        self._waiting: dict[asyncio.Future[ChangesPage], int] = {}
        self._reader: asyncio.Task[None] | None = None

    async def call(self, method: Callable[..., T], *arguments: Any, page: bool = False) -> T:
        """Call `method` in a thread of the streams, or, for one `page`, in a separate pool that streams cannot block.

        If the client disconnects, the call is abandoned.
        """
        threads = self._page_threads if page else self._threads
        if page:
            _check_queue(threads)
        return await anyio.to_thread.run_sync(partial(method, *arguments), limiter=threads, abandon_on_cancel=True)

    async def call_slow(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call `method`, which may take minutes, in one of a few separate threads; it delays no other request."""
        _check_queue(self._slow_call_threads)
        return await anyio.to_thread.run_sync(
            partial(method, *arguments), limiter=self._slow_call_threads, abandon_on_cancel=True
        )

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count an open stream within the context. Raises StreamLimitExceeded."""
        if self.open >= MAX_STREAMS:
            raise StreamLimitExceeded(MAX_STREAMS)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def changes(self, after: int, timeout_s: float) -> ChangesPage:
        """Events after number `after`, as soon as there are any; none after `timeout_s`, or at once if `last` skips
        deleted events.
        """
        latest = await self.call(self.service.changes, after, 0.0, page=True)
        return latest if latest["last"] > after or timeout_s == 0 else await self.next_changes(after, timeout_s)

    async def next_changes(self, after: int, timeout_s: float) -> ChangesPage:
        """Like `changes`, for a client that has read all existing events: one reader waits for all such clients."""
        if after < self._head:  # it fell behind: read separately, so that other clients do not wait for it
            return await self.call(self.service.changes, after, 0.0)
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = after
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        try:
            result: ChangesPage = await asyncio.wait_for(future, timeout_s)
            return result
        except TimeoutError:
            return {"events": [], "last": after}
        finally:
            self._waiting.pop(future, None)

    async def _read(self) -> None:
        while self._waiting:
            oldest = min(self._waiting.values())
            wait = partial(self.service.changes, oldest, STORE_WAIT_S)
            try:
                page = await anyio.to_thread.run_sync(wait, limiter=self._reader_thread)
            except Exception as e:
                for future in self._pop_waiting(-1):
                    future.set_exception(e)
                return
            if page["last"] > oldest:
                self._head = max(self._head, page["last"])
                for future, after in self._pop_waiting(page["last"]).items():
                    new_events = [e for e in page["events"] if e["seq"] > after]
                    future.set_result({"events": new_events, "last": page["last"]})

    def _pop_waiting(self, last: int) -> "dict[asyncio.Future[ChangesPage], int]":
        """Remove and return the futures that wait for events up to number `last` (-1: all futures)."""
        due = {f: after for f, after in self._waiting.items() if not f.done() and (last < 0 or after < last)}
        self._waiting = {f: after for f, after in self._waiting.items() if f not in due}
        return due


def _check_queue(threads: anyio.CapacityLimiter) -> None:
    """Raise TooManyRequests if as many calls wait as there are threads: further ones would wait too long."""
    if threads.statistics().tasks_waiting >= threads.total_tokens:
        raise TooManyRequests(2 * int(threads.total_tokens))


def event(name: str, data: Any) -> bytes:
    """Encode one event, in ASCII: clients that end lines at U+2028 or U+0085, as Python does, would split the data."""
    return f"event: {name}\ndata: {to_json(data, ascii_only=True)}\n\n".encode()


def events(request: Request, source: AsyncIterator[Item], after: Callable[[], None] | None = None) -> StreamingResponse:
    """Stream the items of `source`, (event name, data) or None for "nothing yet". An error becomes the last event.
    `after` is called in a thread when the stream has ended for any reason.

    Raises StreamLimitExceeded.
    """
    shared: Streams = request.app.state.hub.streams
    counted = ExitStack()
    counted.enter_context(shared.counted())
    if after is not None:
        counted.callback(asyncio.get_running_loop().run_in_executor, None, after)

    async def body() -> AsyncIterator[bytes]:
        last = time.monotonic()
        yield b": connected\n\n"
        try:
            async for item in source:
                if request.app.state.stopping.is_set():
                    break
                if item is None and time.monotonic() - last < HEARTBEAT_S:
                    continue
                yield b": still here\n\n" if item is None else event(*item)
                last = time.monotonic()
        except PolyfleetError as e:
            yield event("error", error_body(e)["error"] | {"status": status_of(e)})
        except Exception as e:
            yield event("error", internal_error(e)["error"] | {"status": 500})
            raise

    return _CountedStream(body(), counted)


class _CountedStream(StreamingResponse):
    """A stream that is counted until it has ended, even if its client disconnected before it began."""

    def __init__(self, body: AsyncIterator[bytes], counted: ExitStack):
        super().__init__(body, media_type="text/event-stream")
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._counted:
            await super().__call__(scope, receive, send)


async def follow_changes(shared: Streams, after: int) -> AsyncIterator[Item]:
    """Yield existing changes page by page, then new ones as they happen."""
    behind = True
    while True:
        read = shared.call(shared.service.changes, after, 0.0) if behind else shared.next_changes(after, CHANGES_WAIT_S)
        page = await read
        behind = behind and page["last"] > after
        after = page["last"]
        for change in page["events"]:
            yield "change", change
        if not page["events"]:
            yield None
