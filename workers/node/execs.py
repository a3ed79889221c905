"""Relay input and output of commands that run beside the ranks of attempts on this node.

The agent reads output only on request, so a command that writes more than is fetched has to wait. No state is saved:
commands end with the agent.
"""

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from cluster.errors import FleetError, NotFound
from workers.node.exec_session import (
    Data,
    ExecSession,
    close,
    close_input,
    connect,
    disconnect,
    open_session,
    read,
    set_size,
    write,
)
from workers.protocol.folders import AttemptFolder

if TYPE_CHECKING:
    from workers.attempt.attempts import AttemptManager
    from workers.node.controller_generation import ControllerGeneration

MAX_EXECS = 8
"""Maximum number of commands at a time on one node."""
CLIENT_TIMEOUT_S = 30.0
"""Time without a request after which the client counts as gone."""
IDLE_TIMEOUT_S = 3600.0
"""Time without input or output after which a terminal is closed."""
CHECK_EVERY_S = 1.0


class ExecSessions:
    """Running commands by id. Thread-safe."""

    def __init__(self) -> None:
        self._sessions: dict[str, ExecSession] = {}
        self._lock = threading.Lock()
        self._is_checking = False

    def start(self, folder: AttemptFolder, request: Data, size: tuple[int, int]) -> str:
        """Start a command and return its id.

        `request` is {"rank", "command", "environment", "terminal", "input"}, `size` the rows and columns of a terminal.
        Raises Conflict with the supervisor's reason for a refusal, FleetError.
        """
        with self._lock:
            if len(self._sessions) >= MAX_EXECS:
                raise FleetError(f"{MAX_EXECS} commands run beside jobs of this node already", "end one of them first")
        line = connect(folder)
        try:
            session = open_session(line, request, size)
        except BaseException:
            line.close()
            raise
        number = uuid4().hex
        with self._lock:
            self._sessions[number] = session
            if not self._is_checking:
                self._is_checking = True
                threading.Thread(target=self._close_idle, name="execs", daemon=True).start()
        return number

    def read(self, number: str, cursor: int, timeout_s: float) -> Data:
        """Wait up to `timeout_s` for output: {"pieces": [[stream, bytes]], "next", "ended", "code", "reason"}.

        `cursor` is the `next` of the last reply that arrived, 0 at first: a lost reply is repeated. If `ended`
        without a code, the command was killed, and there is a reason.
        """
        session = self._session(number)
        with session.read_lock:
            if session.last_reply is not None and cursor < session.replies:
                return session.last_reply
            reply = read(session, timeout_s)
            if reply["pieces"] or reply["ended"]:
                session.replies += 1
                session.last_reply = reply | {"next": session.replies}
            session.last_request_s = time.monotonic()
            return reply | {"next": session.replies}

    def write(self, number: str, offset: int, data: bytes, end: bool, timeout_s: float) -> Data:
        """Write input: {"taken": bytes of input written so far, "closed": whether stdin is closed}.

        `offset` is the position of `data` in the command's input. Bytes that were written before are skipped, so that a
        request whose reply was lost can be repeated.
        """
        session = self._session(number)
        with session.write_lock:
            session.last_request_s = session.last_activity_s = time.monotonic()
            remaining = data[max(session.written - offset, 0) :]
            try:
                session.written += write(session, remaining, timeout_s) if offset <= session.written else 0
            except OSError:
                close_input(session)
            if end and session.written >= offset + len(data) and not session.terminal:
                close_input(session)
            return {"taken": session.written, "closed": session.input < 0}

    def resize(self, number: str, rows: int, columns: int) -> None:
        session = self._session(number)
        with suppress(OSError, ValueError):  # it has just ended
            if session.terminal:
                set_size(session.input, rows, columns)

    def close(self, number: str) -> None:
        """End a command and drop it. Does nothing if there is none."""
        with self._lock:
            session = self._sessions.pop(number, None)
        if session is not None:
            close(session)

    def _session(self, number: str) -> ExecSession:
        session = self._sessions.get(number)
        if session is None:
            raise NotFound("this command has ended, or the agent of its node was restarted", "run it again")
        return session

    def _close_idle(self) -> None:
        """End commands without a client, and idle terminals. Runs in a thread while there are commands."""
        while True:
            time.sleep(CHECK_EVERY_S)
            now_s = time.monotonic()
            with self._lock:
                sessions = list(self._sessions.items())
                if not sessions:
                    self._is_checking = False
                    return
            for number, session in sessions:
                if session.terminal and now_s - session.last_activity_s > IDLE_TIMEOUT_S:
                    session.reason = f"its terminal had no input or output for {IDLE_TIMEOUT_S / 60:.0f} minutes"
                    disconnect(session)
                if now_s - session.last_request_s > CLIENT_TIMEOUT_S and not session.read_lock.locked():
                    self.close(number)


class NodeExecs:
    """RPC methods of an agent for commands beside its attempts. Arguments and results are plain data."""

    _attempts: "AttemptManager"
    _generation: "ControllerGeneration"

    def __init__(self) -> None:
        self._execs = ExecSessions()

    def exec_start(self, generation: int, job: str, epoch: int, request: dict[str, Any], size: tuple[int, int]) -> str:
        """Start a command and return its id.

        `request` is {"rank", "command", "environment", "terminal", "input"}; an empty command means a shell. Raises
        Conflict while the attempt accepts none, NotFound, and ControllerSuperseded for an older controller.
        """
        self._generation.check_and_record(generation)
        folder = self._attempts.running_folder(job, epoch, int(request["rank"]))
        return self._execs.start(folder, request, (int(size[0]), int(size[1])))

    def exec_read(self, number: str, cursor: int, timeout_s: float) -> dict[str, Any]:
        return self._execs.read(number, cursor, timeout_s)

    def exec_write(self, number: str, offset: int, data: bytes, end: bool, timeout_s: float) -> dict[str, Any]:
        return self._execs.write(number, offset, data, end, timeout_s)

    def exec_resize(self, number: str, rows: int, columns: int) -> None:
        self._execs.resize(number, rows, columns)

    def exec_close(self, number: str) -> None:
        self._execs.close(number)
