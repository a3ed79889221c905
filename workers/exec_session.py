"""One command beside the ranks of an attempt: the other ends of its pipes, or of its terminal, and the connection to
the attempt's supervisor, which runs it (workers/attempt/exec_commands.py).
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
from workers.attempt.exec_commands import DOOR, LONGEST_BYTES
from workers.attempt.folders import AttemptFolder

START_S = 10.0
PIECE_BYTES = 64 << 10
MOST_BYTES = 256 << 10
"""Of one answer."""
DRAIN_S = 1.0
"""For what is still in the pipes once the command has ended; whoever else holds them open is not waited for."""
Data = dict[str, Any]
STREAMS = ("stdout", "stderr")


@dataclass(eq=False)
class Session:
    """`line` goes to the supervisor; `outs` are the streams to read from by descriptor; `into` takes input, -1 once it
    is closed. `given` counts the answers that had something; the last is kept in case it was lost.
    """

    line: socket.socket
    outs: dict[int, str]
    into: int
    terminal: bool
    heard_s: float = field(default_factory=time.monotonic)
    active_s: float = field(default_factory=time.monotonic)
    taken: int = 0
    code: int | None = None
    reason: str = ""
    over: bool = False
    ended_s: float = 0.0
    given: int = 0
    last: Data | None = None
    reading: threading.Lock = field(default_factory=threading.Lock)
    writing: threading.Lock = field(default_factory=threading.Lock)


def knock(folder: AttemptFolder) -> socket.socket:
    """A connection to the attempt's supervisor. Raises Conflict, FleetError."""
    if not hasattr(socket, "SOCK_SEQPACKET") or not Path("/proc/self/fd").is_dir():
        raise Conflict("commands beside a job need Linux on its node", "run it as a job of its own")
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(START_S)
    try:
        inside = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            line.connect(f"/proc/self/fd/{inside}/{DOOR}")
        finally:
            os.close(inside)
    except OSError as e:
        line.close()
        raise Conflict(
            f"attempt {folder.path.name} takes no commands: {e.strerror or e}",
            "it is starting or ending, or was started by an older version; `polyfleet show` tells its state",
        ) from None
    return line


def begun(line: socket.socket, asked: Data, size: tuple[int, int]) -> Session:
    """Raises Conflict, FleetError."""
    with _streams(asked["terminal"], asked["input"], size) as (theirs, session):
        words = {name: asked[name] for name in ("rank", "command", "environment", "terminal")}
        try:
            socket.send_fds(line, [json.dumps(words, ensure_ascii=False).encode()], list(theirs))
            said = line.recv(LONGEST_BYTES)
        except OSError as e:
            raise FleetError(f"the attempt's supervisor does not answer: {e.strerror or e}", "ask again") from None
        if not said:
            raise Conflict("the attempt ended before the command began", "`polyfleet show` tells its state")
        told = json.loads(said)
        if "error" in told:
            raise Conflict(told["error"], "see `polyfleet show` for ranks and nodes")
        line.setblocking(False)
        return Session(line, *session)


@contextmanager
def _streams(
    terminal: bool, takes_input: bool, size: tuple[int, int]
) -> "Iterator[tuple[tuple[int, int, int], tuple[dict[int, str], int, bool]]]":
    """(the command's stdin, stdout and stderr, which are closed here afterwards; what we read and write). All are
    closed on an error.
    """
    ours: list[int] = []
    theirs: list[int] = []
    try:
        if terminal:
            mine, its = os.openpty()
            ours, theirs = [mine], [its]
            set_size(mine, *size)
            given, session = (its, its, its), ({mine: STREAMS[0]}, mine, True)
        else:
            (out, out_in), (err, err_in) = os.pipe(), os.pipe()
            ours, theirs = [out, err], [out_in, err_in]
            its, mine = os.pipe() if takes_input else (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), -1)
            theirs.append(its)
            ours += [mine] if takes_input else []
            given, session = (its, out_in, err_in), ({out: STREAMS[0], err: STREAMS[1]}, mine, False)
        for descriptor in ours:
            os.set_blocking(descriptor, False)
        yield given, session
    except BaseException:
        for descriptor in ours:
            os.close(descriptor)
        raise
    finally:
        for descriptor in theirs:
            os.close(descriptor)


def set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read(session: Session, timeout_s: float) -> Data:
    pieces: list[list[Any]] = []
    until = time.monotonic() + timeout_s
    while not pieces and not _is_over(session) and (left_s := until - time.monotonic()) > 0:
        for descriptor in _ready(session, min(left_s, DRAIN_S if session.ended_s else left_s)):
            if descriptor == session.line.fileno():
                _hear(session)
            elif piece := _take(session, descriptor):
                pieces.append([session.outs[descriptor], piece])
    session.active_s = time.monotonic() if pieces else session.active_s
    ended = not pieces and _is_over(session)
    return {"pieces": pieces, "ended": ended, "code": session.code, "reason": session.reason}


def _is_over(session: Session) -> bool:
    """The command has ended and all that it wrote was read, or nothing more comes in time."""
    if session.over:
        return True
    return bool(session.ended_s) and (not session.outs or time.monotonic() - session.ended_s > DRAIN_S)


def _ready(session: Session, timeout_s: float) -> list[int]:
    poll = select.poll()
    wanted = [*session.outs, *([] if session.ended_s or session.over else [session.line.fileno()])]
    for descriptor in wanted:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(max(timeout_s, 0.0) * 1000)]


def _take(session: Session, descriptor: int) -> bytes:
    """What there is of a stream; b"" at its end, where a terminal raises EIO."""
    data = bytearray()
    with suppress(BlockingIOError):
        while len(data) < MOST_BYTES // len(STREAMS):
            try:
                piece = os.read(descriptor, PIECE_BYTES)
            except BlockingIOError:
                raise
            except OSError:
                piece = b""
            if not piece:
                if not data:
                    _end_of(session, descriptor)
                break
            data += piece
    return bytes(data)


def _end_of(session: Session, descriptor: int) -> None:
    del session.outs[descriptor]
    if descriptor != session.into:
        os.close(descriptor)


def _hear(session: Session) -> None:
    """The exit code; or nothing, when the attempt has ended."""
    try:
        said = session.line.recv(LONGEST_BYTES)
    except BlockingIOError:
        return
    except OSError:
        said = b""
    session.ended_s = time.monotonic()
    if said:
        session.code = int(json.loads(said)["code"])
    else:
        session.reason = session.reason or "the attempt has ended, and what ran beside it with it"


def write(session: Session, data: bytes, timeout_s: float) -> int:
    """How much was taken within the time. Raises OSError when nobody reads any more."""
    taken, until = 0, time.monotonic() + timeout_s
    while taken < len(data) and session.into >= 0:
        poll = select.poll()
        poll.register(session.into, select.POLLOUT)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            break
        with suppress(BlockingIOError):
            taken += os.write(session.into, data[taken : taken + select.PIPE_BUF])
    return taken


def close_input(session: Session) -> None:
    into, session.into = session.into, -1
    if into >= 0 and into not in session.outs:
        os.close(into)


def hang_up(session: Session) -> None:
    """The supervisor ends what runs; a reading that is under way returns by that, too."""
    with suppress(OSError):
        session.line.shutdown(socket.SHUT_RDWR)


def close(session: Session) -> None:
    session.over = True
    session.reason = session.reason or "whoever asked for it has gone"
    hang_up(session)
    with session.reading, session.writing:
        close_input(session)
        for descriptor in list(session.outs):
            os.close(descriptor)
        session.outs.clear()
        session.line.close()
