"""How a listener on a TCP port shows that it is the server of a home, before it is sent the home's token.

The client sends a random number to the public route `GET /healthz`; the server answers with its HMAC under a key made
from the token. The port is part of it: a listener on another port cannot hand on our server's answer.
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
LONGEST_BYTES = 4096


class Stream(Protocol):
    """A connection that is open, as httpcore has it."""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes: ...
    def write(self, buffer: bytes, timeout: float | None = None) -> None: ...


def challenge_response(token: str, port: int | None, challenge: str) -> str:
    """`port` is None on a Unix socket."""
    key = hmac.digest(token.encode(), PURPOSE, "sha256")
    return hmac.digest(key, f"{port or 0}:{challenge}".encode(), "sha256").hex()


def verify_server(stream: Stream, port: int, token: str) -> bool:
    """Whether who answers on `stream` knows the token, which is not sent. The connection can be used afterwards."""
    challenge = secrets.token_hex(32)
    question = f"GET /healthz?challenge={challenge} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
    stream.write(question.encode(), TIMEOUT_S)
    return hmac.compare_digest(_told(stream).encode(), challenge_response(token, port, challenge).encode())


def _told(stream: Stream) -> str:
    """The proof in the answer; "" when there is none: an older server, or something else."""
    data, deadline = b"", time.monotonic() + TIMEOUT_S
    while not (found := re.match(rb"HTTP/1\.1 200 .*?content-length: (\d{1,4})\r\n.*?\r\n\r\n", data, re.S | re.I)) or (
        len(data) < found.end() + int(found[1])
    ):
        piece = stream.read(LONGEST_BYTES, max(deadline - time.monotonic(), 0.001))
        data += piece
        if not piece or len(data) > LONGEST_BYTES:
            return ""
    try:
        told = json.loads(data[found.end() :])["proof"]
    except (ValueError, KeyError, TypeError):
        return ""
    return told if isinstance(told, str) else ""
