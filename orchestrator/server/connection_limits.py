"""Time-outs for slow requests, and a limit on connections that have not authenticated.

uvicorn limits neither the duration of a request's head or body, nor the size of a head. Here a head must arrive within
HEAD_S of the connection or its first byte, and have at most MAX_HEADER_BYTES; a body may neither pause for BODY_S nor
be slower than BODY_BYTES_PER_S; uvicorn's keep-alive closes idle connections. At most MAX_PIPELINED requests wait on
one connection. At most MAX_UNAUTHENTICATED connections without the token are open: one more closes the oldest.
"""

import asyncio
import os
import resource
from enum import Enum
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orchestrator.home.unix_socket import peer_uid

HEAD_S = 10.0
BODY_S = 30.0
BODY_BYTES_PER_S = 1024
MAX_HEADER_BYTES = 64 << 10
"""Limit for all bytes that are not body; the framing of chunks may be as large as their content, too."""
MAX_PIPELINED = 16
"""Requests that wait for earlier responses. Reading pauses while some wait, and continues with each response."""
MAX_UNAUTHENTICATED = 256
MAX_ACCEPTED = 64
"""Fewer than MAX_UNAUTHENTICATED, so that a new client can send its request before other connections push it out."""
BACKLOG = 4096
MAX_FILES = 65536


class UnauthenticatedConnections:
    """Connections that have not sent the token yet, oldest first."""

    def __init__(self, maximum: int = MAX_UNAUTHENTICATED):
        self.maximum = maximum
        self._waiting: dict[LimitedConnection, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, connection: "LimitedConnection") -> None:
        self._waiting[connection] = None
        if len(self._waiting) > self.maximum:
            oldest = next((c for c in self._waiting if c.idle), connection)
            self.remove(oldest)
            oldest.transport.abort()

    def remove(self, connection: "LimitedConnection") -> None:
        """Remove a connection that has authenticated or ended."""
        self._waiting.pop(connection, None)


class RequestPhase(Enum):
    """Part of a request that has started and is not complete."""

    HEAD = 1
    BODY = 2


class LimitedConnection(HttpToolsProtocol):
    """One connection with its deadline. `make_protocol` makes a subclass for each server, which sets
    `unauthenticated`.
    """

    unauthenticated: UnauthenticatedConnections

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "connection": self}
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0
        self._phase: RequestPhase | None = None
        self._timed_phase: RequestPhase | None = None
        self._head_bytes = self._body_bytes = 0

    @property
    def idle(self) -> bool:
        """Whether no request of this connection is being processed."""
        return self.cycle is None or self.cycle.response_complete

    def mark_authenticated(self) -> None:
        """Record that the guard has accepted a token on this connection."""
        self.unauthenticated.remove(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # as uvicorn declares it
        if peer_uid(transport.get_extra_info("socket")) not in (None, os.geteuid(), 0):
            self.transport.abort()
            return
        self.unauthenticated.add(self)
        self._start_timer(RequestPhase.HEAD, HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self.unauthenticated.remove(self)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._phase is None:  # complete, or nothing but empty lines
            self._head_bytes = 0
            if self.idle and self._timer is None:
                self._start_timer(RequestPhase.HEAD, HEAD_S)
        elif self._head_bytes > MAX_HEADER_BYTES + self._body_bytes:
            self.send_400_response("The head of the request is too long.")
        elif self._phase is RequestPhase.BODY:
            self._extend_body_deadline(len(data))
        elif self._timed_phase is not RequestPhase.HEAD:
            self._start_timer(RequestPhase.HEAD, HEAD_S)

    def _extend_body_deadline(self, more_bytes: int) -> None:
        if self._timed_phase is not RequestPhase.BODY:
            self._start_timer(RequestPhase.BODY, BODY_S)
        self._deadline_s = min(self._deadline_s + more_bytes / BODY_BYTES_PER_S, self.loop.time() + BODY_S)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase, self._body_bytes = RequestPhase.HEAD, 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._phase = RequestPhase.BODY
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase = None
        self._stop_timer()

    def _start_timer(self, phase: RequestPhase, within_s: float) -> None:
        """Set the deadline of a phase: it must be complete within `within_s`."""
        self._stop_timer()
        self._timed_phase, self._deadline_s = phase, self.loop.time() + within_s
        self._timer = self.loop.call_at(self._deadline_s, self._on_deadline)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timed_phase = None

    def _on_deadline(self) -> None:
        """Close the connection at its deadline, unless bytes that arrived extended it or the server itself paused
        reading.
        """
        if self.flow.read_paused:
            self._deadline_s = self.loop.time() + BODY_S
        if self._deadline_s > self.loop.time():
            self._timer = self.loop.call_at(self._deadline_s, self._on_deadline)
        else:
            self.transport.abort()


def make_protocol() -> type[LimitedConnection]:
    """Make the connection class of one server, with a separate count of unauthenticated connections."""
    return type("ServerConnection", (LimitedConnection,), {"unauthenticated": UnauthenticatedConnections()})


def raise_file_limit() -> None:
    """Raise the limit of open files: each connection is one, and the usual soft limit is 1,024 per process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
