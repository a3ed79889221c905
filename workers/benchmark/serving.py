"""A session that is asked from outside its process: one JSON object in, one out, over a socket of this user alone.

The agent of the node asks on behalf of the server. Where the socket is stands in the attempt's folder; the socket
itself lies in a folder of its own, since its path may have 100 bytes and no more.
"""

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.errors import FleetError, PolyfleetError, UserError
from workers.attempt.redaction import Redactor

ADDRESS = "session.json"
LOOK_S = 0.5
SILENT_S = 900.0
"""A session nobody has asked anything for so long belongs to a run that will not come back."""
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
        while silent_s < SILENT_S:
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
    """False once told to end."""
    with asking.makefile("rwb") as stream:
        message = json.loads(stream.readline() or b"{}")
        if message.get("do") == "end":
            told: Message = {"result": {}}
        else:
            try:
                told = {"result": handle(message)}
            except PolyfleetError as e:
                told = {"error": e.message, "remedy": e.remedy}
        stream.write(json.dumps(redact.plain(told, keys=False)).encode() + b"\n")
        stream.flush()
    return bool(message.get("do") != "end")


def ask(folder: Path, message: Message, timeout_s: float) -> Any:
    """Ask the session whose attempt lives in `folder`. Raises FleetError where none answers."""
    try:
        address = json.loads((folder / ADDRESS).read_text())
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(timeout_s)
            asking.connect(address["socket"])
            with asking.makefile("rwb") as stream:
                stream.write(json.dumps(message).encode() + b"\n")
                stream.flush()
                line = stream.readline()
    except (OSError, ValueError, KeyError) as e:
        raise FleetError(f"the session does not answer: {type(e).__name__}: {e}", "see the log of its job") from None
    if not line:
        raise FleetError("the session ended amid a call", "see the log of its job")
    told = json.loads(line)
    if "error" in told:
        raise UserError(told["error"], told["remedy"])
    return told["result"]
