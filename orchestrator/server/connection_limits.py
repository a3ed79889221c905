"""Connections that nobody needs end, and those without a token never keep out the others.

uvicorn has no limit on how long a request's head or body may take, nor on how long a head is. Here a head has HEAD_S
from the connection or its first byte, and MOST_HEAD_BYTES; a body may neither pause for BODY_S nor be slower than
BODY_BYTES_PER_S; an idle connection between requests ends by uvicorn's keep-alive. At most MOST_PIPELINED requests wait
on one connection, and at most STRANGERS connections exist that have not shown the token: one more closes the oldest.
"""

import asyncio
import os
import resource
from enum import Enum
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orchestrator.server.unix_socket import peer_uid

HEAD_S = 10.0
BODY_S = 30.0
BODY_BYTES_PER_S = 1024
MOST_HEAD_BYTES = 64 << 10
"""Of all that is not body: chunks may take as much again as what they hold."""
MOST_PIPELINED = 16
"""Requests that wait for the answers before them. Reading pauses while some wait, but goes on with each answer."""
STRANGERS = 256
ACCEPTED_AT_ONCE = 64
"""Fewer than STRANGERS: who has just connected can send a request before as many others push it out."""
BACKLOG = 4096
MOST_FILES = 65536


class UnauthenticatedConnections:
    """Connections that have not shown the token yet, the oldest first."""

    def __init__(self, most: int = STRANGERS):
        self.most = most
        self._waiting: dict[LimitedConnection, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, connection: "LimitedConnection") -> None:
        self._waiting[connection] = None
        if len(self._waiting) > self.most:
            oldest = next((c for c in self._waiting if c.idle), connection)
            self.leave(oldest)
            oldest.transport.abort()

    def leave(self, connection: "LimitedConnection") -> None:
        """It has shown the token, or has ended."""
        self._waiting.pop(connection, None)


class RequestPhase(Enum):
    """What of a request has begun and is not complete."""

    HEAD = 1
    BODY = 2


class LimitedConnection(HttpToolsProtocol):
    """One connection with its deadline. `strangers` is set in the subclass of a server: see `protocol`."""

    strangers: UnauthenticatedConnections

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "connection": self}
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0
        self._phase: RequestPhase | None = None
        self._awaited: RequestPhase | None = None
        self._head_bytes = self._body_bytes = 0

    @property
    def idle(self) -> bool:
        """No request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def trusted(self) -> None:
        """The guard saw the token on it."""
        self.strangers.leave(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # as uvicorn declares it
        if peer_uid(transport.get_extra_info("socket")) not in (None, os.geteuid(), 0):
            self.transport.abort()
            return
        self.strangers.enter(self)
        self._await(RequestPhase.HEAD, HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self.strangers.leave(self)
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._phase is None:  # complete, or nothing but empty lines
            self._head_bytes = 0
            if self.idle and self._timer is None:
                self._await(RequestPhase.HEAD, HEAD_S)
        elif self._head_bytes > MOST_HEAD_BYTES + self._body_bytes:
            self.send_400_response("The head of the request is too long.")
        elif self._phase is RequestPhase.BODY:
            self._body_goes_on(len(data))
        elif self._awaited is not RequestPhase.HEAD:
            self._await(RequestPhase.HEAD, HEAD_S)

    def _body_goes_on(self, more_bytes: int) -> None:
        if self._awaited is not RequestPhase.BODY:
            self._await(RequestPhase.BODY, BODY_S)
        self._deadline_s = min(self._deadline_s + more_bytes / BODY_BYTES_PER_S, self.loop.time() + BODY_S)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase, self._body_bytes = RequestPhase.HEAD, 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._phase = RequestPhase.BODY
        if len(self.pipeline) > MOST_PIPELINED:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase = None
        self._cancel()

    def _await(self, phase: RequestPhase, within_s: float) -> None:
        """What has begun has to be complete `within_s`."""
        self._cancel()
        self._awaited, self._deadline_s = phase, self.loop.time() + within_s
        self._timer = self.loop.call_at(self._deadline_s, self._late)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._awaited = None

    def _late(self) -> None:
        """More time is given for bytes that came meanwhile, and while it is we who do not read."""
        if self.flow.read_paused:
            self._deadline_s = self.loop.time() + BODY_S
        if self._deadline_s > self.loop.time():
            self._timer = self.loop.call_at(self._deadline_s, self._late)
        else:
            self.transport.abort()


def protocol() -> type[LimitedConnection]:
    """For one server: connections with a count of their own."""
    return type("ServerConnection", (LimitedConnection,), {"strangers": UnauthenticatedConnections()})


def raise_file_limit() -> None:
    """Each connection is an open file, and systems allow a process only 1,024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
