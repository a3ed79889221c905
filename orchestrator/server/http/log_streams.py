"""Logs of jobs for requests: one page, the last lines, or a stream of all lines as they arrive."""

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import anyio

from cluster.errors import SpecError
from cluster.input.untrusted_files import UnreadableFile, parse_json
from orchestrator.server.http.streams import Item, Streams

POLL_S = (0.2, 1.0)
LOG_POLLS_PER_S = 50
"""Total polls of all idle logs per second: with many, each is polled less often than POLL_S."""
PAGE_BYTES = 1 << 20
Data = dict[str, Any]
T = TypeVar("T")


def cursor_from(text: str) -> dict[str, int]:
    """Parse a cursor that the client received, JSON in a query parameter. Raises SpecError."""
    try:
        cursor = parse_json((text or "{}").encode(), "cursor", max_depth=1)
        if all(type(value) is int and value >= 0 for value in cursor.values()):
            return dict(cursor)
    except (UnreadableFile, UnicodeEncodeError, AttributeError):
        pass
    raise SpecError("cursor", "is not a cursor", "send the `cursor` of the previous response, as JSON")


class LogStream:
    """Log of one job from a cursor on, page by page. A job's name is resolved once: later it may mean another job."""

    def __init__(self, shared: Streams, ref: str, rank: int | None, attempt: int | None, cursor: dict[str, int]):
        self.streams, self.ref, self.rank, self.attempt, self.cursor = shared, ref, rank, attempt, cursor
        self.service = self.streams.service
        self.ended = self.following = False

    async def check(self) -> None:
        """Raise NotFound before the stream begins: afterwards the HTTP status is sent and cannot be changed."""
        self.ref = (await self.streams.call(self.service.jobs_table.find, self.ref, page=True)).job.id

    async def page(self, limit_bytes: int = PAGE_BYTES) -> list[Data]:
        return await self._lines(self.service.job_logs.read, self.cursor, limit_bytes)

    async def tail(self, count: int) -> list[Data]:
        """The last `count` lines that exist now. Moves the cursor behind them."""
        return await self._lines(self.service.job_logs.tail, count)

    async def away(self, first: int = 0) -> list[str]:
        """Reasons why lines of attempts, from number `first` on, are missing: their nodes did not respond."""
        return await self.streams.call(self._read, self.service.job_logs.unread_notes, first)

    async def _lines(self, method: Callable[..., Data], *arguments: Any) -> list[Data]:
        reply = await self.streams.call(self._read, method, *arguments, page=not self.following)
        self.ref, self.cursor, self.ended = reply["job"], reply["cursor"], reply["ended"]
        return list(reply["lines"])

    def _read(self, method: Callable[..., T], *arguments: Any) -> T:
        return method(self.service.find_run_job(self.ref), self.rank, self.attempt, *arguments)

    async def follow(self, tail: int | None) -> AsyncIterator[Item]:
        self.streams.logs += 1
        self.following = True
        try:
            async for item in self._follow(tail):
                yield item
        finally:
            self.streams.logs -= 1

    async def _follow(self, tail: int | None) -> AsyncIterator[Item]:
        """Yield the log. The first event is sent even without lines: it contains the job's id for a reconnect."""
        yield self._log(await (self.page() if tail is None else self.tail(tail)))
        wait_s = POLL_S[0]
        while True:
            lines = await self.page()
            wait_s = POLL_S[0] if lines else min(wait_s * 1.3, POLL_S[1])
            yield self._log(lines) if lines else None
            if self.ended and not lines:
                record = await self.streams.call(self.service.jobs_table.find, self.ref)
                yield "end", {"state": str(record.job.state)}
                return
            if not lines:
                await anyio.sleep(max(wait_s, self.streams.logs / LOG_POLLS_PER_S))

    def _log(self, lines: list[Data]) -> tuple[str, Data]:
        return "log", {"job": self.ref, "lines": lines, "cursor": self.cursor}
