"""Server-sent events over a plain streaming response, and the polls that feed them.

The service's methods block, so each call runs in a thread. Streams have threads of their own: many open logs must not
keep `GET /v1/jobs` waiting.
"""

import json
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from fastapi import Request
from fastapi.responses import StreamingResponse

from cluster.errors import PolyfleetError, SpecError
from orchestrator.server.answers import error_body, status_of, to_json, unforeseen
from orchestrator.server.facade import Data, Facade

HEARTBEAT_S = 15.0
POLL_S = (0.2, 1.0)
CHANGES_WAIT_S = 2.0
STREAM_THREADS = 256
PAGE_BYTES = 1 << 20
T = TypeVar("T")


async def blocking(request: Request, call: Callable[..., T], *arguments: Any) -> T:
    """`call` in a thread of the streams. A client that leaves does not wait for it."""
    state = request.app.state
    if state.stream_threads is None:  # a limiter belongs to the event loop it was made in
        state.stream_threads = anyio.CapacityLimiter(STREAM_THREADS)
    return await anyio.to_thread.run_sync(
        partial(call, *arguments), limiter=state.stream_threads, abandon_on_cancel=True
    )


def event(name: str, data: Any) -> bytes:
    """One event. ASCII only: clients that end lines at U+2028 or U+0085, as Python does, would cut the data there."""
    return f"event: {name}\ndata: {to_json(data, ascii_only=True)}\n\n".encode()


def events(request: Request, source: AsyncIterator[tuple[str, Any] | None]) -> StreamingResponse:
    """Sends what `source` yields as (event name, data), None being "nothing yet". An error becomes the last event."""

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
            yield event("error", unforeseen(e)["error"] | {"status": 500})
            raise

    return StreamingResponse(body(), media_type="text/event-stream")


def cursor_from(text: str) -> dict[str, int]:
    """A cursor as the client got it, JSON in a query parameter. Raises SpecError."""
    try:
        cursor = json.loads(text or "{}")
        return {str(key): int(value) for key, value in cursor.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise SpecError("cursor", "not a cursor", "send back the `cursor` of the answer before, as JSON") from None


class Logs:
    """The log of one job from a cursor on, page by page."""

    def __init__(self, request: Request, ref: str, rank: int | None, epoch: int | None, cursor: dict[str, int]):
        self.request, self.ref, self.rank, self.epoch, self.cursor = request, ref, rank, epoch, cursor
        self.service: Facade = request.app.state.service
        self.ended = False

    async def check(self) -> None:
        """Raises NotFound before a stream has begun: afterwards the status is sent and cannot be changed."""
        await blocking(self.request, self.service.job, self.ref)

    async def page(self, limit_bytes: int = PAGE_BYTES) -> list[Data]:
        return await self._lines(self.service.logs, self.cursor, limit_bytes)

    async def tail(self, count: int) -> list[Data]:
        """The last `count` lines there are now, whatever the cursor was; it is behind them afterwards."""
        return await self._lines(self.service.logs_tail, count)

    async def _lines(self, ask: Callable[..., Data], *arguments: Any) -> list[Data]:
        answer = await blocking(self.request, ask, self.ref, self.rank, self.epoch, *arguments)
        self.cursor, self.ended = answer["cursor"], answer["ended"]
        return list(answer["lines"])

    async def follow(self, tail: int | None) -> AsyncIterator[tuple[str, Any] | None]:
        if tail is not None and (lines := await self.tail(tail)):
            yield "log", {"lines": lines, "cursor": self.cursor}
        wait_s = POLL_S[0]
        while True:
            lines = await self.page()
            wait_s = POLL_S[0] if lines else min(wait_s * 1.3, POLL_S[1])
            yield ("log", {"lines": lines, "cursor": self.cursor}) if lines else None
            if self.ended and not lines:
                yield "end", {"state": (await blocking(self.request, self.service.job, self.ref))["state"]}
                return
            if not lines:
                await anyio.sleep(wait_s)


async def follow_changes(request: Request, after: int) -> AsyncIterator[tuple[str, Any] | None]:
    service: Facade = request.app.state.service
    while True:
        found = await blocking(request, service.changes, after, CHANGES_WAIT_S)
        after = found["last"]
        for change in found["events"]:
            yield "change", change
        if not found["events"]:
            yield None
