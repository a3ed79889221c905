"""Challenge by which a listener on a TCP port proves that it is the home's server, before it is sent the token.

The client sends a random number to the public route `GET /healthz`; the server responds with its HMAC under a key
derived from the token. The port is part of the message, so a listener on another port cannot relay the response.
"""

import hmac
import json
import re
import secrets
import time
from typing import Protocol

CHALLENGE = "^[0-9a-f]{32,128}$"
PURPOSE = b"polyfleet: this listener knows the token"
TIMEOUT_S = 5.0
MAX_CHALLENGE_BYTES = 4096


class Stream(Protocol):
    """An open connection, with the interface of httpcore."""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes: ...
    def write(self, buffer: bytes, timeout: float | None = None) -> None: ...


def challenge_response(token: str, port: int | None, challenge: str) -> str:
    """Compute the response to a challenge. `port` is None on a Unix socket."""
    key = hmac.digest(token.encode(), PURPOSE, "sha256")
    return hmac.digest(key, f"{port or 0}:{challenge}".encode(), "sha256").hex()


def verify_server(stream: Stream, port: int, token: str) -> bool:
    """Return whether the peer of `stream` has the token, without sending it. The connection stays usable."""
    challenge = secrets.token_hex(32)
    request = f"GET /healthz?challenge={challenge} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
    stream.write(request.encode(), TIMEOUT_S)
    return hmac.compare_digest(_read_proof(stream).encode(), challenge_response(token, port, challenge).encode())


def _read_proof(stream: Stream) -> str:
    """The proof in the response; "" if there is none, e.g. from another kind of server."""
    data, deadline = b"", time.monotonic() + TIMEOUT_S
    while not (head := re.match(rb"HTTP/1\.1 200 .*?content-length: (\d{1,4})\r\n.*?\r\n\r\n", data, re.S | re.I)) or (
        len(data) < head.end() + int(head[1])
    ):
        piece = stream.read(MAX_CHALLENGE_BYTES, max(deadline - time.monotonic(), 0.001))
        data += piece
        if not piece or len(data) > MAX_CHALLENGE_BYTES:
            return ""
    try:
        proof = json.loads(data[head.end() :])["proof"]
    except (ValueError, KeyError, TypeError):
        return ""
    return proof if isinstance(proof, str) else ""
