"""The agent's side of a command beside the ranks of an attempt: its pipes or its terminal.

A connection leads to the attempt's supervisor, which runs the command (workers/attempt/supervision/exec_commands.py).
"""

import fcntl
import json
import os
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import Conflict, FleetError
from workers.attempt.supervision.exec_commands import MAX_COMMAND_BYTES, SOCKET_NAME
from workers.protocol.folders import AttemptFolder

START_TIMEOUT_S = 10.0
PIECE_BYTES = 64 << 10
MAX_BUFFERED_BYTES = 256 << 10
"""Maximum output in one reply."""
DRAIN_S = 1.0
"""Time to read the pipes after the command has ended; other processes that have them open are not waited for."""
Data = dict[str, Any]
STREAMS = ("stdout", "stderr")


@dataclass(eq=False)
class ExecSession:
    """A running command.

    `line`: connection to the supervisor; `outputs`: streams to read from, by descriptor; `input`: descriptor for input,
    -1 once it is closed. `replies` counts the replies with output; `last_reply` is the newest of them, in case it was
    lost.
    """

    connection: socket.socket
    outputs: dict[int, str]
    input: int
    terminal: bool
    last_request_s: float = field(default_factory=time.monotonic)
    last_activity_s: float = field(default_factory=time.monotonic)
    written: int = 0
    code: int | None = None
    reason: str = ""
    is_closed: bool = False
    ended_s: float = 0.0
    replies: int = 0
    last_reply: Data | None = None
    read_lock: threading.Lock = field(default_factory=threading.Lock)
    write_lock: threading.Lock = field(default_factory=threading.Lock)


def connect(folder: AttemptFolder) -> socket.socket:
    """Connect to the attempt's supervisor. Raises Conflict, FleetError."""
    if not hasattr(socket, "SOCK_SEQPACKET") or not Path("/proc/self/fd").is_dir():
        raise Conflict("commands beside a job need Linux on its node", "run it as a job of its own")
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(START_TIMEOUT_S)
    try:
        record_folder = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            line.connect(f"/proc/self/fd/{record_folder}/{SOCKET_NAME}")
        finally:
            os.close(record_folder)
    except OSError as e:
        line.close()
        raise Conflict(
            f"attempt {folder.path.name} does not accept commands: {e.strerror or e}",
            "it is starting or ending; `polyfleet show` shows its state",
        ) from None
    return line


def open_session(line: socket.socket, request: Data, size: tuple[int, int]) -> ExecSession:
    """Request a command and return its session. Raises Conflict, FleetError."""
    with _open_streams(request["terminal"], request["input"], size) as (theirs, session):
        fields = {name: request[name] for name in ("rank", "command", "environment", "terminal")}
        try:
            socket.send_fds(line, [json.dumps(fields, ensure_ascii=False).encode()], list(theirs))
            data = line.recv(MAX_COMMAND_BYTES)
        except OSError as e:
            raise FleetError(f"the attempt's supervisor does not respond: {e.strerror or e}", "run it again") from None
        if not data:
            raise Conflict("the attempt ended before the command started", "`polyfleet show` shows its state")
        reply = json.loads(data)
        if "error" in reply:
            raise Conflict(reply["error"], "see `polyfleet show` for ranks and nodes")
        line.setblocking(False)
        return ExecSession(line, *session)


@contextmanager
def _open_streams(
    terminal: bool, takes_input: bool, size: tuple[int, int]
) -> "Iterator[tuple[tuple[int, int, int], tuple[dict[int, str], int, bool]]]":
    """Create pipes or a terminal. Yields (stdin, stdout and stderr of the command; arguments of the session).

    The command's ends are closed at the end of the block; after an error all are.
    """
    ours: list[int] = []
    theirs: list[int] = []
    try:
        if terminal:
            our_end, their_end = os.openpty()
            ours, theirs = [our_end], [their_end]
            set_size(our_end, *size)
            streams, session = (their_end, their_end, their_end), ({our_end: STREAMS[0]}, our_end, True)
        else:
            (out, out_in), (err, err_in) = os.pipe(), os.pipe()
            ours, theirs = [out, err], [out_in, err_in]
            their_end, our_end = os.pipe() if takes_input else (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), -1)
            theirs.append(their_end)
            ours += [our_end] if takes_input else []
            streams, session = (their_end, out_in, err_in), ({out: STREAMS[0], err: STREAMS[1]}, our_end, False)
        for descriptor in ours:
            os.set_blocking(descriptor, False)
        yield streams, session
    except BaseException:
        for descriptor in ours:
            os.close(descriptor)
        raise
    finally:
        for descriptor in theirs:
            os.close(descriptor)


def set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read(session: ExecSession, timeout_s: float) -> Data:
    pieces: list[list[Any]] = []
    deadline_s = time.monotonic() + timeout_s
    while not pieces and not _is_over(session) and (left_s := deadline_s - time.monotonic()) > 0:
        for descriptor in _ready(session, min(left_s, DRAIN_S if session.ended_s else left_s)):
            if descriptor == session.connection.fileno():
                _receive_exit_code(session)
            elif piece := _read_stream(session, descriptor):
                pieces.append([session.outputs[descriptor], piece])
    session.last_activity_s = time.monotonic() if pieces else session.last_activity_s
    ended = not pieces and _is_over(session)
    return {"pieces": pieces, "ended": ended, "code": session.code, "reason": session.reason}


def _is_over(session: ExecSession) -> bool:
    """Return whether the command has ended and its output was read, or DRAIN_S passed since it ended."""
    if session.is_closed:
        return True
    return bool(session.ended_s) and (not session.outputs or time.monotonic() - session.ended_s > DRAIN_S)


def _ready(session: ExecSession, timeout_s: float) -> list[int]:
    poll = select.poll()
    descriptors = [*session.outputs, *([] if session.ended_s or session.is_closed else [session.connection.fileno()])]
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(max(timeout_s, 0.0) * 1000)]


def _read_stream(session: ExecSession, descriptor: int) -> bytes:
    """Read what a stream has now; b"" at its end, where a terminal raises EIO."""
    data = bytearray()
    with suppress(BlockingIOError):
        while len(data) < MAX_BUFFERED_BYTES // len(STREAMS):
            try:
                piece = os.read(descriptor, PIECE_BYTES)
            except BlockingIOError:
                raise
            except OSError:
                piece = b""
            if not piece:
                if not data:
                    _close_stream(session, descriptor)
                break
            data += piece
    return bytes(data)


def _close_stream(session: ExecSession, descriptor: int) -> None:
    del session.outputs[descriptor]
    if descriptor != session.input:
        os.close(descriptor)


def _receive_exit_code(session: ExecSession) -> None:
    """Read the exit code, or notice that the attempt has ended and closed the connection."""
    try:
        data = session.connection.recv(MAX_COMMAND_BYTES)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    session.ended_s = time.monotonic()
    if data:
        session.code = int(json.loads(data)["code"])
    else:
        session.reason = session.reason or "the attempt has ended, and with it the commands beside it"


def write(session: ExecSession, data: bytes, timeout_s: float) -> int:
    """Write input and return the bytes written within the time.

    Raises OSError if the command has closed its stdin.
    """
    written, deadline_s = 0, time.monotonic() + timeout_s
    while written < len(data) and session.input >= 0:
        poll = select.poll()
        poll.register(session.input, select.POLLOUT)
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            break
        with suppress(BlockingIOError):
            written += os.write(session.input, data[written : written + select.PIPE_BUF])
    return written


def close_input(session: ExecSession) -> None:
    descriptor, session.input = session.input, -1
    if descriptor >= 0 and descriptor not in session.outputs:
        os.close(descriptor)


def disconnect(session: ExecSession) -> None:
    """Close the connection, so that the supervisor ends the command.

    A `read` in another thread returns then, too.
    """
    with suppress(OSError):
        session.connection.shutdown(socket.SHUT_RDWR)


def close(session: ExecSession) -> None:
    session.is_closed = True
    session.reason = session.reason or "its client has disconnected"
    disconnect(session)
    with session.read_lock, session.write_lock:
        close_input(session)
        for descriptor in list(session.outputs):
            os.close(descriptor)
        session.outputs.clear()
        session.connection.close()
