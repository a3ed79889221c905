"""Serve a session to other processes: one JSON object in, one out, over a Unix socket that only this user can open.

The node's agent sends requests on behalf of the server. A file in the attempt's folder contains the socket's path; the
socket itself is in a temporary folder, because its path may have at most about 100 bytes.
"""

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.errors import FleetError, PolyfleetError, UserError
from cluster.input.untrusted_files import UnreadableFile, parse_json, read_json
from workers.protocol.redaction import Redactor

ADDRESS = "session.json"
POLL_S = 0.5
IDLE_TIMEOUT_S = 900.0
"""Seconds without a request after which a session ends: its run is gone."""
MAX_ADDRESS_BYTES = 4096
MAX_REPLY_BYTES = 32 << 20
Message = dict[str, Any]


def serve(folder: Path, handle: Callable[[Message], Any], stopped: Callable[[], bool]) -> str:
    """Serve until {"do": "end"}, until `stopped()`, or until no request comes. Return ended, stopped or forgotten."""
    with tempfile.TemporaryDirectory(prefix="pf-session-") as private, socket.socket(socket.AF_UNIX) as listening:
        path = str(Path(private) / "socket")
        listening.bind(path)
        listening.listen(8)
        listening.settimeout(POLL_S)
        address = folder / ADDRESS
        part = address.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"socket": path, "pid": os.getpid()}))
        part.replace(address)
        idle_s, redact = 0.0, Redactor.for_rank(os.environ)
        while idle_s < IDLE_TIMEOUT_S:
            if stopped():
                return "stopped"
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                idle_s += POLL_S
                continue
            idle_s = 0.0
            with connection:
                if not _serve_one(connection, handle, redact):
                    return "ended"
        return "forgotten"


def _serve_one(connection: socket.socket, handle: Callable[[Message], Any], redact: Redactor) -> bool:
    """Handle one request; return False if it ends the session. A lost connection or invalid request does not."""
    try:
        with connection.makefile("rb") as stream:
            message = _parse_message(stream.readline())
    except (OSError, UnreadableFile):
        return True
    ends = message.get("do") == "end"
    response = json.dumps(redact.clean_data({"result": {}} if ends else _handle(message, handle), keys=False))
    with suppress(OSError):
        connection.sendall(response.encode() + b"\n")
    return not ends


def _parse_message(line: bytes) -> Message:
    """Parse a request. Raises UnreadableFile if it is not a complete JSON object."""
    message = parse_json(line, "a message") if line.endswith(b"\n") else None
    if not isinstance(message, dict):
        raise UnreadableFile("a message", "is not a complete JSON object")
    return message


def _handle(message: Message, handle: Callable[[Message], Any]) -> Message:
    try:
        return {"result": handle(message)}
    except PolyfleetError as e:
        return {"error": e.message, "remedy": e.remedy}


def request(folder: Path, message: Message, timeout_s: float) -> Any:
    """Send a request to the session of the attempt that writes `folder`.

    User code runs there, so the reply is limited in time and size. Raises FleetError if the session does not reply, and
    UserError if it refuses the request.
    """
    try:
        line = _exchange(_read_address(folder), message, time.monotonic() + timeout_s)
        reply = parse_json(line, "its reply") if line else None
    except (OSError, ValueError, UnreadableFile) as e:
        raise FleetError(f"the session does not reply: {type(e).__name__}: {e}", "see the log of its job") from None
    if reply is None:
        raise FleetError("the session ended during a request", "see the log of its job")
    if isinstance(reply, dict) and "result" in reply:
        return reply["result"]
    if isinstance(reply, dict) and "error" in reply:
        raise UserError(str(reply["error"]), str(reply.get("remedy", "")))
    raise FleetError("the session replied with neither a result nor an error", "see the log of its job")


def _read_address(folder: Path) -> str:
    address = read_json(folder / ADDRESS, MAX_ADDRESS_BYTES)
    if not isinstance(address, dict) or not isinstance(address.get("socket"), str):
        raise UnreadableFile(ADDRESS, "does not contain the path of a socket")
    return str(address["socket"])


def _exchange(address: str, message: Message, deadline_s: float) -> bytes:
    """Send a request and return the reply, or b"" if the peer closes. Partial data does not extend the deadline."""
    received = bytearray()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_remaining_s(deadline_s))
        connection.connect(address)
        connection.sendall(json.dumps(message).encode() + b"\n")
        while not received.endswith(b"\n"):
            connection.settimeout(_remaining_s(deadline_s))
            piece = connection.recv(1 << 20)
            if not piece:
                return b""
            received += piece
            if len(received) > MAX_REPLY_BYTES:
                raise UnreadableFile("its reply", f"is longer than {MAX_REPLY_BYTES} bytes")
    return bytes(received)


def _remaining_s(deadline_s: float) -> float:
    if (left := deadline_s - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left
