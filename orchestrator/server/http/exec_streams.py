"""Commands beside jobs over HTTP: output as server-sent events, input in separate requests, ordered by offset.

A command belongs to the connection that started it and transfers its output: when that connection ends for any reason,
the command is stopped.
"""

import base64
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from fastapi import Request
from fastapi.responses import StreamingResponse

from orchestrator.runtime.jobs.exec_relay import MAX_RELAYS, ExecRequest
from orchestrator.server.http.streams import Data, Item, StreamLimitExceeded, events
from orchestrator.services.service import Service

WAIT_S = 10.0
T = TypeVar("T")


class ExecThreads:
    """Threads of one server for commands: each waits for output in one, so that no other request has to wait."""

    def __init__(self, service: Service):
        self.service = service
        self._threads = anyio.CapacityLimiter(3 * MAX_RELAYS)

    async def call(self, method: Callable[..., T], *arguments: Any) -> T:
        return await anyio.to_thread.run_sync(
            partial(method, *arguments), limiter=self._threads, abandon_on_cancel=True
        )


def exec_threads(request: Request) -> ExecThreads:
    threads: ExecThreads = request.app.state.hub.execs
    return threads


async def run(request: Request, ref: str, command: ExecRequest) -> StreamingResponse:
    """Run a command. Events: `started` {exec, job, attempt, rank, node}, then `output` {stream, data in base64} as it
    arrives, then `end` {code, reason}.

    If the command cannot be started, raises the service's error before the stream begins, so that the HTTP status can
    still be set.
    """
    shared = exec_threads(request)
    started = await shared.call(shared.service.exec_start, ref, command)
    close = partial(shared.service.exec_close, started["exec"])
    try:
        return events(request, _output(shared, started), after=close)
    except StreamLimitExceeded:
        await shared.call(close)
        raise


async def _output(shared: ExecThreads, started: Data) -> AsyncIterator[Item]:
    yield "started", started
    exec_id, cursor = started["exec"], 0
    while True:
        reply = await shared.call(shared.service.exec_read, exec_id, cursor, WAIT_S)
        cursor = reply["next"]
        for stream, data in reply["pieces"]:
            yield "output", {"stream": stream, "data": base64.b64encode(data).decode()}
        if reply["ended"]:
            yield "end", {"code": reply["code"], "reason": reply["reason"]}
            return
        if not reply["pieces"]:
            yield None
