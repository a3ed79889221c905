"""Commands beside the ranks of attempts on this node, as the agent hands them on: what goes in, what comes out.

The agent reads only when asked, so that a command which writes more than is fetched waits. Nothing is kept: when the
agent ends, so do they.
"""

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from cluster.errors import FleetError, NotFound
from workers.attempt.folders import AttemptFolder
from workers.exec_session import Data, Session, begun, close, close_input, hang_up, knock, read, set_size, write

if TYPE_CHECKING:
    from workers.attempt.attempts import AttemptManager
    from workers.controller_generation import ControllerGeneration

MOST = 8
"""At a time on one node."""
SILENT_S = 30.0
"""Without a question for so long whoever asked has gone."""
IDLE_S = 3600.0
"""A terminal in which nobody types and nothing is written for so long is closed."""
LOOK_S = 1.0


class Execs:
    """By a number of their own. Safe to use from several threads."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()
        self._looking = False

    def start(self, folder: AttemptFolder, asked: Data, size: tuple[int, int]) -> str:
        """`asked` is {"rank", "command", "environment", "terminal", "input"}, `size` rows and columns of a terminal.

        Raises Conflict, with what the supervisor refuses, FleetError.
        """
        with self._lock:
            if len(self._sessions) >= MOST:
                raise FleetError(f"{MOST} commands run beside jobs of this node already", "end one of them first")
        line = knock(folder)
        try:
            session = begun(line, asked, size)
        except BaseException:
            line.close()
            raise
        number = uuid4().hex
        with self._lock:
            self._sessions[number] = session
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="execs", daemon=True).start()
        return number

    def read(self, number: str, seen: int, timeout_s: float) -> Data:
        """{"pieces": [[stream, bytes]], "next", "ended", "code", "reason"}, as soon as there is anything, else after
        `timeout_s`. `seen` is the `next` of the last answer that arrived, 0 at first: a lost answer is given again.

        `ended` without a code has a reason: the command was ended.
        """
        session = self._of(number)
        with session.reading:
            if session.last is not None and seen < session.given:
                return session.last
            answer = read(session, timeout_s)
            if answer["pieces"] or answer["ended"]:
                session.given += 1
                session.last = answer | {"next": session.given}
            session.heard_s = time.monotonic()
            return answer | {"next": session.given}

    def write(self, number: str, offset: int, data: bytes, end: bool, timeout_s: float) -> Data:
        """{"taken": bytes of its input so far, "closed": it takes no more}. `offset` is where `data` belongs in all of
        it: what was taken already is skipped, so that an order that was answered by nobody can be given again.
        """
        session = self._of(number)
        with session.writing:
            session.heard_s = session.active_s = time.monotonic()
            left = data[max(session.taken - offset, 0) :]
            try:
                session.taken += write(session, left, timeout_s) if offset <= session.taken else 0
            except OSError:
                close_input(session)
            if end and session.taken >= offset + len(data) and not session.terminal:
                close_input(session)
            return {"taken": session.taken, "closed": session.into < 0}

    def resize(self, number: str, rows: int, columns: int) -> None:
        session = self._of(number)
        with suppress(OSError, ValueError):  # it has ended meanwhile
            if session.terminal:
                set_size(session.into, rows, columns)

    def close(self, number: str) -> None:
        """End it, if it has not ended. Known or not: it is not, afterwards."""
        with self._lock:
            session = self._sessions.pop(number, None)
        if session is not None:
            close(session)

    def _of(self, number: str) -> Session:
        session = self._sessions.get(number)
        if session is None:
            raise NotFound("this command has ended, or its node's agent was started anew", "run it again")
        return session

    def _look(self) -> None:
        """While there are any: those that nobody asks for any more are ended, and idle terminals."""
        while True:
            time.sleep(LOOK_S)
            now = time.monotonic()
            with self._lock:
                found = list(self._sessions.items())
                if not found:
                    self._looking = False
                    return
            for number, session in found:
                if session.terminal and now - session.active_s > IDLE_S:
                    session.reason = f"nobody typed and nothing was written for {IDLE_S / 60:.0f} minutes"
                    hang_up(session)
                if now - session.heard_s > SILENT_S and not session.reading.locked():
                    self.close(number)


class NodeExecs:
    """What an agent answers about commands beside its attempts: arguments and results are plain data."""

    _attempts: "AttemptManager"
    _generation: "ControllerGeneration"

    def __init__(self) -> None:
        self._execs = Execs()

    def exec_start(self, generation: int, job: str, epoch: int, asked: dict[str, Any], size: tuple[int, int]) -> str:
        """Its number. `asked` is {"rank", "command", "environment", "terminal", "input"}; no command is a shell.

        Raises Conflict while the attempt takes none, NotFound, and ControllerSuperseded for an older controller.
        """
        self._generation.admit(generation)
        folder = self._attempts.running(job, epoch, int(asked["rank"]))
        return self._execs.start(folder, asked, (int(size[0]), int(size[1])))

    def exec_read(self, number: str, seen: int, timeout_s: float) -> dict[str, Any]:
        return self._execs.read(number, seen, timeout_s)

    def exec_write(self, number: str, offset: int, data: bytes, end: bool, timeout_s: float) -> dict[str, Any]:
        return self._execs.write(number, offset, data, end, timeout_s)

    def exec_resize(self, number: str, rows: int, columns: int) -> None:
        self._execs.resize(number, rows, columns)

    def exec_close(self, number: str) -> None:
        self._execs.close(number)
