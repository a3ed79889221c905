"""Access control at the root of the ASGI application: every request to any route must pass all checks here.

The checks, in this order: a Host of this machine (421, prevents DNS rebinding), the token (401), a content type that no
HTML form can send (415), the size of the body (413), the number of concurrent requests (429). Only `GET /healthz` needs
no token.
"""

import hashlib
import hmac

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.limits import MAX_CONCURRENT_REQUESTS, TooManyRequests
from orchestrator.server.http import responses
from orchestrator.server.http.responses import simple_error

PUBLIC = frozenset({("GET", "/healthz")})
SAFE_VERBS = frozenset({"GET", "HEAD", "OPTIONS"})
CODE_ARCHIVES = "/v1/code-archives/"
BULK_PATH = "/v1/jobs/bulk"
RAW_BODY_LIMITS = {
    "/v1/uploads/": (8 << 20) + 1024,
    "/v1/checkpoints/incoming/": (8 << 20) + 1024,
    "/v1/checkpoints/incoming": 256 << 20,
}
"""Paths whose PUT has a binary body (pieces of files and checkpoints, manifests) with its limit; longest path first."""
LONG_REQUESTS = ("/v1/changes", "/v1/checkpoints", "/v1/uploads")
HTTP_PORT = 80
"""Clients omit this port in the Host header."""
JSON_LIMIT_BYTES = 1024 * 1024
BULK_LIMIT_BYTES = 16 * 1024 * 1024
CODE_ARCHIVE_LIMIT_BYTES = 512 * 1024 * 1024
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)
Refusal = tuple[int, str, str, str]


class Guard:
    def __init__(self, app: ASGIApp, token: str):
        self.app = app
        self.in_flight = 0
        self._digest = hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif (refused := self._refusal(scope)) is not None:
            status, kind, message, remedy = refused
            await simple_error(status, kind, message, remedy)(scope, receive, _with_headers(send))
        elif _is_long_request(scope):
            await self.app(scope, _limit_body(receive, body_limit_bytes(scope)), _with_headers(send))
        else:
            await self._count_request(scope, receive, _with_headers(send))

    async def _count_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one more request, or refuse it at the limit: in an unlimited queue all clients would wait longer."""
        if self.in_flight >= MAX_CONCURRENT_REQUESTS:
            await responses.error_response(TooManyRequests(MAX_CONCURRENT_REQUESTS))(scope, receive, send)
            return
        self.in_flight += 1
        try:
            await self.app(scope, _limit_body(receive, body_limit_bytes(scope)), send)
        finally:
            self.in_flight -= 1

    def _refusal(self, scope: Scope) -> Refusal | None:
        if not _host_is_ours(scope):
            return (
                421,
                "Misdirected",
                "this server accepts only 127.0.0.1 and localhost as host",
                "use the address that `polyfleet server status` shows: http://localhost on its socket, or its url",
            )
        if (scope["method"], scope["path"]) in PUBLIC:
            return None
        if not self._is_valid_token(_header(scope, b"authorization")):
            return (
                401,
                "Unauthorized",
                "no valid token",
                "send `Authorization: Bearer <content of the file token in the home>`",
            )
        _mark_authenticated(scope)
        return _content_type_refusal(scope) or _length_refusal(scope)

    def _is_valid_token(self, authorization: bytes | None) -> bool:
        scheme, _, token = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == b"bearer"


def _mark_authenticated(scope: Scope) -> None:
    """Mark the connection, if there is one, as authenticated."""
    if (connection := scope.get("state", {}).get("connection")) is not None:
        connection.mark_authenticated()


def _is_long_request(scope: Scope) -> bool:
    """Return whether a request may be open for long without holding a thread; such requests have separate limits."""
    path = scope["path"]
    if _raw(scope):  # its body is in memory
        return False
    return (
        path.endswith("/stream")
        or path.startswith(LONG_REQUESTS)
        or _is_files_route(path)
        or (scope["method"], path) in PUBLIC
    )


def _is_files_route(path: str) -> bool:
    """Return whether a path is `/v1/jobs/{ref}/files…`: these routes have separate threads."""
    return path.startswith("/v1/jobs/") and path.split("/")[4:5] == ["files"]


def body_limit_bytes(scope: Scope) -> int:
    if scope["path"] == BULK_PATH:
        return BULK_LIMIT_BYTES
    if raw := _raw(scope):
        return RAW_BODY_LIMITS[raw]
    return CODE_ARCHIVE_LIMIT_BYTES if scope["path"].startswith(CODE_ARCHIVES) else JSON_LIMIT_BYTES


def _raw(scope: Scope) -> str:
    """The path of RAW that matches the request, or ""."""
    return next((path for path in RAW_BODY_LIMITS if scope["method"] == "PUT" and scope["path"].startswith(path)), "")


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


def _content_type_refusal(scope: Scope) -> Refusal | None:
    if scope["method"] in SAFE_VERBS:
        return None
    expected = "application/zip" if scope["path"].startswith(CODE_ARCHIVES) else "application/json"
    expected = "application/octet-stream" if _raw(scope) else expected
    actual = (_header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
    if actual == expected.encode():
        return None
    return (
        415,
        "UnsupportedMediaType",
        f"the request needs the content type {expected}",
        f"send `Content-Type: {expected}`",
    )


def _length_refusal(scope: Scope) -> Refusal | None:
    limit = body_limit_bytes(scope)
    length = _header(scope, b"content-length") or b"0"
    if length.isdigit() and int(length[:20]) <= limit:
        return None
    return (
        413,
        "TooLarge",
        f"the body has {length.decode('latin-1')} bytes; the limit is {limit} bytes",
        "send a smaller body",
    )


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
