"""Commands beside jobs over HTTP: output as server-sent events, input as requests of its own, in order by offset.

A command belongs to the connection that started it and carries its output: when that ends, however it ends, so does
the command.
"""

import base64
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from fastapi import Request
from fastapi.responses import StreamingResponse

from orchestrator.runtime.exec_relay import MOST, Asked
from orchestrator.server.service_protocol import Data, ServiceProtocol
from orchestrator.server.streams import Item, StreamLimitExceeded, events

WAIT_S = 10.0
T = TypeVar("T")


class ExecThreads:
    """Of one server: a command that waits for output holds a thread, and keeps no other request waiting."""

    def __init__(self, service: ServiceProtocol):
        self.service = service
        self._threads = anyio.CapacityLimiter(3 * MOST)

    async def call(self, method: Callable[..., T], *arguments: Any) -> T:
        return await anyio.to_thread.run_sync(
            partial(method, *arguments), limiter=self._threads, abandon_on_cancel=True
        )


def execs(request: Request) -> ExecThreads:
    state = request.app.state
    if state.execs is None:
        state.execs = ExecThreads(state.service)
    found: ExecThreads = state.execs
    return found


async def run(request: Request, ref: str, asked: Asked) -> StreamingResponse:
    """`started` {exec, job, epoch, rank, node}, `output` {stream, data in base64} as it comes, `end` {code, reason}.

    Raises what the service raises where it cannot be started, while a status can still be sent.
    """
    shared = execs(request)
    begun = await shared.call(shared.service.exec_start, ref, asked)
    close = partial(shared.service.exec_close, begun["exec"])
    try:
        return events(request, _output(shared, begun), after=close)
    except StreamLimitExceeded:
        await shared.call(close)
        raise


async def _output(shared: ExecThreads, begun: Data) -> AsyncIterator[Item]:
    yield "started", begun
    known, seen = begun["exec"], 0
    while True:
        told = await shared.call(shared.service.exec_read, known, seen, WAIT_S)
        seen = told["next"]
        for stream, data in told["pieces"]:
            yield "output", {"stream": stream, "data": base64.b64encode(data).decode()}
        if told["ended"]:
            yield "end", {"code": told["code"], "reason": told["reason"]}
            return
        if not told["pieces"]:
            yield None
