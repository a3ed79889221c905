"""A session that is asked from outside its process: one JSON object in, one out, over a socket of this user alone.

The agent of the node asks on behalf of the server. Where the socket is stands in the attempt's folder; the socket
itself lies in a folder of its own, since its path may have 100 bytes and no more.
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
from cluster.untrusted_files import UnreadableFile, parse_json, read_json
from workers.attempt.redaction import Redactor

ADDRESS = "session.json"
LOOK_S = 0.5
IDLE_TIMEOUT_S = 900.0
"""A session nobody has asked anything for so long belongs to a run that will not come back."""
MOST_ADDRESS_BYTES = 4096
MOST_ANSWER_BYTES = 32 << 20
Message = dict[str, Any]


def serve(folder: Path, handle: Callable[[Message], Any], stopped: Callable[[], bool]) -> str:
    """Answer until told {"do": "end"}, until `stopped`, or until nobody asks; returns which of them it was."""
    with tempfile.TemporaryDirectory(prefix="pf-session-") as private, socket.socket(socket.AF_UNIX) as listening:
        path = str(Path(private) / "socket")
        listening.bind(path)
        listening.listen(8)
        listening.settimeout(LOOK_S)
        address = folder / ADDRESS
        part = address.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"socket": path, "pid": os.getpid()}))
        part.replace(address)
        silent_s, redact = 0.0, Redactor.of_rank(os.environ)
        while silent_s < IDLE_TIMEOUT_S:
            if stopped():
                return "stopped"
            try:
                asking, _ = listening.accept()
            except TimeoutError:
                silent_s += LOOK_S
                continue
            silent_s = 0.0
            with asking:
                if not _answer(asking, handle, redact):
                    return "ended"
        return "forgotten"


def _answer(asking: socket.socket, handle: Callable[[Message], Any], redact: Redactor) -> bool:
    """False once told to end. Whoever hangs up amid a call, or asks nothing that can be read, ends no session."""
    try:
        with asking.makefile("rb") as stream:
            message = _message(stream.readline())
    except (OSError, UnreadableFile):
        return True
    ends = message.get("do") == "end"
    told = json.dumps(redact.plain({"result": {}} if ends else _told(message, handle), keys=False))
    with suppress(OSError):
        asking.sendall(told.encode() + b"\n")
    return not ends


def _message(line: bytes) -> Message:
    """Raises UnreadableFile."""
    found = parse_json(line, "a message") if line.endswith(b"\n") else None
    if not isinstance(found, dict):
        raise UnreadableFile("a message", "is not a whole JSON object")
    return found


def _told(message: Message, handle: Callable[[Message], Any]) -> Message:
    try:
        return {"result": handle(message)}
    except PolyfleetError as e:
        return {"error": e.message, "remedy": e.remedy}


def request(folder: Path, message: Message, timeout_s: float) -> Any:
    """Ask the session whose attempt writes `folder`: user code runs there, so its answer is bounded in time and size.

    Raises FleetError where none answers, UserError with what the session refuses.
    """
    try:
        line = _asked(_address(folder), message, time.monotonic() + timeout_s)
        told = parse_json(line, "its answer") if line else None
    except (OSError, ValueError, UnreadableFile) as e:
        raise FleetError(f"the session does not answer: {type(e).__name__}: {e}", "see the log of its job") from None
    if told is None:
        raise FleetError("the session ended amid a call", "see the log of its job")
    if isinstance(told, dict) and "result" in told:
        return told["result"]
    if isinstance(told, dict) and "error" in told:
        raise UserError(str(told["error"]), str(told.get("remedy", "")))
    raise FleetError("the session answered with neither a result nor an error", "see the log of its job")


def _address(folder: Path) -> str:
    found = read_json(folder / ADDRESS, MOST_ADDRESS_BYTES)
    if not isinstance(found, dict) or not isinstance(found.get("socket"), str):
        raise UnreadableFile(ADDRESS, "names no socket")
    return str(found["socket"])


def _asked(address: str, message: Message, deadline_s: float) -> bytes:
    """The line that comes back, b"" when the other side hangs up. A byte now and then does not put off the deadline."""
    got = bytearray()
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_left(deadline_s))
        asking.connect(address)
        asking.sendall(json.dumps(message).encode() + b"\n")
        while not got.endswith(b"\n"):
            asking.settimeout(_left(deadline_s))
            piece = asking.recv(1 << 20)
            if not piece:
                return b""
            got += piece
            if len(got) > MOST_ANSWER_BYTES:
                raise UnreadableFile("its answer", f"is longer than {MOST_ANSWER_BYTES} bytes")
    return bytes(got)


def _left(deadline_s: float) -> float:
    if (left := deadline_s - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left
