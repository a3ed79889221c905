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

from orchestrator.runtime.jobs.exec_relay import MAX_RELAYS
from orchestrator.server.http.streams import Item
from orchestrator.services.service import Service
from orchestrator.views.logs import ExecStarted

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


async def follow_command(shared: ExecThreads, started: ExecStarted) -> AsyncIterator[Item]:
    """Yield the events of a command: `started`, then `output` {stream, data in base64} as it arrives, then `end` {code,
    reason}.
    """
    yield "started", started
    exec_id, cursor = started["exec"], 0
    while True:
        reply = await shared.call(shared.service.exec_relay.read, exec_id, cursor, WAIT_S)
        cursor = reply["next"]
        for stream, data in reply["pieces"]:
            yield "output", {"stream": stream, "data": base64.b64encode(data).decode()}
        if reply["ended"]:
            yield "end", {"code": reply["code"], "reason": reply["reason"]}
            return
        if not reply["pieces"]:
            yield None
