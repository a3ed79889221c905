"""Access control at the root of the ASGI application: every request to any route must pass all checks here.

The checks, in this order: a Host of this machine (421, prevents DNS rebinding), the token (401), a row in the table of
actions (404, 405), the role that the action requires (403), a content type that no HTML form can send (415), the size
of the body (413), the number of concurrent requests (429). An action whose row has no role needs no token.
"""

import hashlib
import hmac
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.limits import MAX_CONCURRENT_REQUESTS, TooManyRequests
from orchestrator.server.actions import Action, ActionTable
from orchestrator.server.http import responses
from orchestrator.server.http.responses import simple_error
from orchestrator.verbs.declare import Role

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
TOKEN_ROLE = Role.ADMIN
"""Role of who has the token."""
HTTP_PORT = 80
"""Clients omit this port in the Host header."""
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)
SEE_DOCUMENT = "see /openapi.json for what is accepted"


class _Refused(Exception):
    """A request that did not pass a check, with the response."""

    def __init__(self, status: int, kind: str, message: str, remedy: str):
        super().__init__(message)
        self.response = simple_error(status, kind, message, remedy)


class Guard:
    def __init__(self, app: ASGIApp, token: str, actions: ActionTable):
        self.app = app
        self.in_flight = 0
        self._digest = hashlib.sha256(token.encode()).digest()
        self._actions = actions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._respond(scope, receive, _with_headers(send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            action = self._check_request(scope)
        except _Refused as e:
            await e.response(scope, receive, send)
            return
        limited = _limit_body(receive, action.body.limit_bytes)
        if action.may_stay_open:
            await self.app(scope, limited, send)
        else:
            await self._count_request(scope, limited, send)

    async def _count_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one more request, or refuse it at the limit: in an unlimited queue all clients would wait longer."""
        if self.in_flight >= MAX_CONCURRENT_REQUESTS:
            await responses.error_response(TooManyRequests(MAX_CONCURRENT_REQUESTS))(scope, receive, send)
            return
        self.in_flight += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.in_flight -= 1

    def _check_request(self, scope: Scope) -> Action:
        """Return the action of a request that passes all checks. Raises _Refused."""
        _check_host(scope)
        action = self._actions.find(scope["method"], scope["path"])
        if action is not None and action.least is None:
            return action
        self._check_token(scope)
        if action is None:
            raise self._unknown_action(scope)
        _check_role(action)
        _check_content_type(scope, action)
        _check_length(scope, action)
        return action

    def _check_token(self, scope: Scope) -> None:
        scheme, _, token = (_header(scope, b"authorization") or b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        if not hmac.compare_digest(digest, self._digest) or scheme.lower() != b"bearer":
            remedy = "send `Authorization: Bearer <content of the file token in the home>`"
            raise _Refused(401, "Unauthorized", "no valid token", remedy)
        _mark_authenticated(scope)

    def _unknown_action(self, scope: Scope) -> _Refused:
        """The error for a path without an action, or for one that has actions with other methods."""
        methods = self._actions.methods_of(scope["path"])
        if not methods:
            return _Refused(404, "NotFound", HTTPStatus.NOT_FOUND.phrase, SEE_DOCUMENT)
        refused = _Refused(405, "UserError", HTTPStatus.METHOD_NOT_ALLOWED.phrase, SEE_DOCUMENT)
        refused.response.headers["Allow"] = ", ".join(methods)
        return refused


def _mark_authenticated(scope: Scope) -> None:
    """Mark the connection, if there is one, as authenticated."""
    if (connection := scope.get("state", {}).get("connection")) is not None:
        connection.mark_authenticated()


def _check_host(scope: Scope) -> None:
    if not _host_is_ours(scope):
        raise _Refused(
            421,
            "Misdirected",
            "this server accepts only 127.0.0.1 and localhost as host",
            "use the address that `polyfleet server status` shows: http://localhost on its socket, or its url",
        )


def _check_role(action: Action) -> None:
    if action.least is not None and action.least > TOKEN_ROLE:
        role, least = TOKEN_ROLE.name.lower(), action.least.name.lower()
        message = f"{action.method} {action.path} needs the role {least}; this token has the role {role}"
        raise _Refused(403, "Forbidden", message, f"use a token with the role {least}")


def _check_content_type(scope: Scope, action: Action) -> None:
    expected = action.body.content_type
    actual = (_header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
    if scope["method"] not in SAFE_METHODS and actual != expected.encode():
        message = f"the request needs the content type {expected}"
        raise _Refused(415, "UnsupportedMediaType", message, f"send `Content-Type: {expected}`")


def _check_length(scope: Scope, action: Action) -> None:
    limit = action.body.limit_bytes
    length = _header(scope, b"content-length") or b"0"
    if not length.isdigit() or int(length[:20]) > limit:
        message = f"the body has {length.decode('latin-1')} bytes; the limit is {limit} bytes"
        raise _Refused(413, "TooLarge", message, "send a smaller body")


def _header(scope: Scope, name: bytes) -> bytes | None:
    """The header's value; None if it is absent or occurs more than once, which is ambiguous."""
    values = [value for key, value in scope["headers"] if key == name]
    return bytes(values[0]) if len(values) == 1 else None


def _host_is_ours(scope: Scope) -> bool:
    port = scope["server"][1]  # None: a Unix socket
    host = (_header(scope, b"host") or b"").lower()
    names = (b"127.0.0.1", b"localhost")
    if port in (None, HTTP_PORT) and host in names:
        return True
    return port is not None and host in [b"%s:%d" % (name, port) for name in names]


def _limit_body(receive: Receive, limit_bytes: int) -> Receive:
    """Limit the bytes that actually arrive: a chunked body has no Content-Length, and a Content-Length may be wrong."""
    received_bytes = 0

    async def counting() -> Message:
        nonlocal received_bytes
        message = await receive()
        received_bytes += len(message.get("body", b""))
        if received_bytes > limit_bytes:
            raise HTTPException(413, f"the body exceeds the limit of {limit_bytes} bytes")
        return message

    return counting


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *HEADERS]
        await send(message)

    return sending
