"""Server-sent events over a plain streaming response, and the polls that feed them.

The service's methods block, so each call runs in a thread; a stream that waits holds none. Streams have threads of
their own, and few: many open logs must not keep `GET /v1/jobs` waiting.
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

from cluster.errors import FleetError, PolyfleetError, SpecError
from cluster.untrusted_files import UnreadableFile, parse_json
from orchestrator.limits import TooManyRequests
from orchestrator.server.responses import error_body, internal_error, status_of, to_json
from orchestrator.server.service_protocol import Data, ServiceProtocol

HEARTBEAT_S = 15.0
POLL_S = (0.2, 1.0)
CHANGES_WAIT_S = 2.0
LOOK_S = 0.5
"""A wait in the store ends after this, so that it follows those who have begun to wait meanwhile."""
STREAM_THREADS = 16
PAGE_THREADS = 64
PATIENT_THREADS = 16
MOST_STREAMS = 512
LOG_POLLS_PER_S = 50
"""What idle logs share: with many, each is looked at less often than POLL_S has it."""
PAGE_BYTES = 1 << 20
Item = tuple[str, Any] | None
T = TypeVar("T")


class StreamLimitExceeded(FleetError):
    """As many are open as the server serves at a time."""

    retry_after_s = 10

    def __init__(self, most: int):
        super().__init__(
            f"the server has its maximum of {most} streams open", "close a `polyfleet logs -f`, or retry in 10 s"
        )
        self.args = (most,)


class Streams:
    """What the streams of one server share. Belongs to one event loop; made on first use in it."""

    def __init__(self, service: ServiceProtocol):
        self.service = service
        self.open = self.logs = 0
        self._threads = anyio.CapacityLimiter(STREAM_THREADS)
        self._page_threads = anyio.CapacityLimiter(PAGE_THREADS)
        self._patient_threads = anyio.CapacityLimiter(PATIENT_THREADS)
        self._reader_thread = anyio.CapacityLimiter(1)
        self._head = 0
        self._waiting: dict[asyncio.Future[Data], int] = {}
        self._reader: asyncio.Task[None] | None = None

    async def call(self, method: Callable[..., T], *arguments: Any, page: bool = False) -> T:
        """`method` in a thread of the streams, or of those who ask for one `page`: streams do not keep them waiting.

        A client that leaves does not wait for it.
        """
        threads = self._page_threads if page else self._threads
        if page:
            _refuse_crowd(threads)
        return await anyio.to_thread.run_sync(partial(method, *arguments), limiter=threads, abandon_on_cancel=True)

    async def patient(self, method: Callable[..., T], *arguments: Any) -> T:
        """`method`, which may take minutes, in one of a few threads: however many ask, others are answered."""
        _refuse_crowd(self._patient_threads)
        return await anyio.to_thread.run_sync(
            partial(method, *arguments), limiter=self._patient_threads, abandon_on_cancel=True
        )

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Raises StreamLimitExceeded."""
        if self.open >= MOST_STREAMS:
            raise StreamLimitExceeded(MOST_STREAMS)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def changes(self, after: int, timeout_s: float) -> Data:
        """Events past `after`, as soon as there are any; else none, after `timeout_s`, or at once where `last` moves
        past events that are gone.
        """
        found = await self.call(self.service.changes, after, 0.0, page=True)
        return found if found["last"] > after or timeout_s == 0 else await self.next_changes(after, timeout_s)

    async def next_changes(self, after: int, timeout_s: float) -> Data:
        """The same for one who has read all there was: one reader waits for everybody."""
        if after < self._head:  # it fell behind: nobody else waits until it has read its share
            return await self.call(self.service.changes, after, 0.0)
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = after
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        try:
            news: Data = await asyncio.wait_for(future, timeout_s)
            return news
        except TimeoutError:
            return {"events": [], "last": after}
        finally:
            self._waiting.pop(future, None)

    async def _read(self) -> None:
        while self._waiting:
            seen = min(self._waiting.values())
            wait = partial(self.service.changes, seen, LOOK_S)
            try:
                found = await anyio.to_thread.run_sync(wait, limiter=self._reader_thread)
            except Exception as e:
                for future in self._take(-1):
                    future.set_exception(e)
                return
            if found["last"] > seen:
                self._head = max(self._head, found["last"])
                for future, after in self._take(found["last"]).items():
                    news = [e for e in found["events"] if e["seq"] > after]
                    future.set_result({"events": news, "last": found["last"]})

    def _take(self, last: int) -> "dict[asyncio.Future[Data], int]":
        """Who waits for anything up to number `last` (-1: everybody); they wait no longer."""
        taken = {f: after for f, after in self._waiting.items() if not f.done() and (last < 0 or after < last)}
        self._waiting = {f: after for f, after in self._waiting.items() if f not in taken}
        return taken


def streams(request: Request) -> Streams:
    state = request.app.state
    if state.streams is None:
        state.streams = Streams(state.service)
    found: Streams = state.streams
    return found


async def patient(request: Request, method: Callable[..., T], *arguments: Any) -> T:
    return await streams(request).patient(method, *arguments)


def _refuse_crowd(threads: anyio.CapacityLimiter) -> None:
    """Raises TooManyRequests where as many wait as there are threads: more would wait without an end in sight."""
    if threads.statistics().tasks_waiting >= threads.total_tokens:
        raise TooManyRequests(2 * int(threads.total_tokens))


def event(name: str, data: Any) -> bytes:
    """One event. ASCII only: clients that end lines at U+2028 or U+0085, as Python does, would cut the data there."""
    return f"event: {name}\ndata: {to_json(data, ascii_only=True)}\n\n".encode()


def events(request: Request, source: AsyncIterator[Item], after: Callable[[], None] | None = None) -> StreamingResponse:
    """Sends what `source` yields as (event name, data), None being "nothing yet". An error becomes the last event.
    `after` is called in a thread once the stream has ended, however it ends.

    Raises StreamLimitExceeded.
    """
    counted = ExitStack()
    counted.enter_context(streams(request).counted())
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

    return _Counted(body(), counted)


class _Counted(StreamingResponse):
    """A stream that is counted until it has ended, also when its client left before it began."""

    def __init__(self, body: AsyncIterator[bytes], counted: ExitStack):
        super().__init__(body, media_type="text/event-stream")
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._counted:
            await super().__call__(scope, receive, send)


def cursor_from(text: str) -> dict[str, int]:
    """A cursor as the client got it, JSON in a query parameter. Raises SpecError."""
    try:
        cursor = parse_json((text or "{}").encode(), "cursor", deepest=1)
        if all(type(value) is int and value >= 0 for value in cursor.values()):
            return dict(cursor)
    except (UnreadableFile, UnicodeEncodeError, AttributeError):
        pass
    raise SpecError("cursor", "not a cursor", "send back the `cursor` of the answer before, as JSON")


class LogStream:
    """The log of one job from a cursor on, page by page. A name is looked up once: later it may mean another job."""

    def __init__(self, request: Request, ref: str, rank: int | None, epoch: int | None, cursor: dict[str, int]):
        self.streams, self.ref, self.rank, self.epoch, self.cursor = streams(request), ref, rank, epoch, cursor
        self.service = self.streams.service
        self.ended = self.following = False

    async def check(self) -> None:
        """Raises NotFound before a stream has begun: afterwards the status is sent and cannot be changed."""
        self.ref = (await self.streams.call(self.service.job, self.ref, page=True))["id"]

    async def page(self, limit_bytes: int = PAGE_BYTES) -> list[Data]:
        return await self._lines(self.service.logs, self.cursor, limit_bytes)

    async def tail(self, count: int) -> list[Data]:
        """The last `count` lines there are now, whatever the cursor was; it is behind them afterwards."""
        return await self._lines(self.service.logs_tail, count)

    async def away(self, first: int = 0) -> list[str]:
        """Of which attempts, from number `first` on, lines are missing: their nodes did not answer."""
        return list(await self.streams.call(self.service.logs_away, self.ref, self.rank, self.epoch, first))

    async def _lines(self, ask: Callable[..., Data], *arguments: Any) -> list[Data]:
        asked = (self.ref, self.rank, self.epoch, *arguments)
        answer = await self.streams.call(ask, *asked, page=not self.following)
        self.ref, self.cursor, self.ended = answer["job"], answer["cursor"], answer["ended"]
        return list(answer["lines"])

    async def follow(self, tail: int | None) -> AsyncIterator[Item]:
        self.streams.logs += 1
        self.following = True
        try:
            async for item in self._follow(tail):
                yield item
        finally:
            self.streams.logs -= 1

    async def _follow(self, tail: int | None) -> AsyncIterator[Item]:
        """The first `log` is sent though it may have no lines: a client whose connection breaks knows its job by it."""
        yield self._log(await (self.page() if tail is None else self.tail(tail)))
        wait_s = POLL_S[0]
        while True:
            lines = await self.page()
            wait_s = POLL_S[0] if lines else min(wait_s * 1.3, POLL_S[1])
            yield self._log(lines) if lines else None
            if self.ended and not lines:
                yield "end", {"state": (await self.streams.call(self.service.job, self.ref))["state"]}
                return
            if not lines:
                await anyio.sleep(max(wait_s, self.streams.logs / LOG_POLLS_PER_S))

    def _log(self, lines: list[Data]) -> tuple[str, Data]:
        return "log", {"job": self.ref, "lines": lines, "cursor": self.cursor}


async def follow_changes(request: Request, after: int) -> AsyncIterator[Item]:
    """First what there is, page by page; then what comes."""
    shared, behind = streams(request), True
    while True:
        read = shared.call(shared.service.changes, after, 0.0) if behind else shared.next_changes(after, CHANGES_WAIT_S)
        found = await read
        behind = behind and found["last"] > after
        after = found["last"]
        for change in found["events"]:
            yield "change", change
        if not found["events"]:
            yield None
