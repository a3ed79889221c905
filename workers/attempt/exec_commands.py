"""Commands that people run beside the ranks of an attempt: `polyfleet exec` and `polyfleet shell`.

The supervisor starts them, so that they are of the attempt's process tree and control group and end with it, whatever
they do to their environment. They see what a rank sees, and are no rank: their ends end nothing, and they keep nothing
alive. The agent asks through a socket in the attempt's folder, with the descriptors that a command is to have; the
connection stays open while it runs, and tells its exit code. Once the other end closes it, the command and what it
started are ended. Standard library only, as the supervisor.
"""

import errno
import fcntl
import json
import os
import selectors
import signal
import socket
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from workers.attempt import cgroup_spawn, lease, process_tree
from workers.attempt.rank_processes import before_exec, block_signals, secret_names

DOOR = "door"
"""The socket, in the attempt's record folder, which is the supervisor's working directory: its path is short so."""
MOST = 8
"""At a time in one attempt on one node."""
LONGEST_BYTES = 128 << 10
GRACE_S = 2.0
"""From SIGHUP to SIGKILL, once nobody is there any more."""


@dataclass(eq=False)
class Guest:
    """A connection, and the command it asked for, which leads a session; 0 while it has asked for none."""

    line: socket.socket
    pid: int = 0
    ended: bool = False
    kill_at_s: float = float("inf")


class Beside:
    """`ranks` are the launch record's; `group` opens the control group, or gives None. Of one thread."""

    def __init__(
        self,
        ranks: list[dict[str, Any]],
        secrets: dict[str, str],
        group: Callable[[], int | None],
        selector: selectors.BaseSelector,
    ):
        self._ranks = {int(rank["rank"]): rank for rank in ranks}
        self._secrets, self._group, self._selector = secrets, group, selector
        self._door: socket.socket | None = None
        self._guests: set[Guest] = set()

    def open(self) -> None:
        """From now on commands are taken. Without space for the socket, or elsewhere than on Linux, none are."""
        if not process_tree.LINUX:
            return
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            door.bind(DOOR)
            Path(DOOR).chmod(0o600)
            door.listen(MOST)
        except OSError:
            door.close()
            return
        door.setblocking(False)
        self._door = door
        self._selector.register(door, selectors.EVENT_READ, self._enter)

    def _enter(self) -> None:
        assert self._door is not None
        with suppress(OSError):
            line, _ = self._door.accept()
            line.setblocking(False)
            guest = Guest(line)
            self._guests.add(guest)
            self._selector.register(line, selectors.EVENT_READ, lambda: self._hear(guest))

    def _hear(self, guest: Guest) -> None:
        """What it wants; or that it is gone."""
        try:
            said, given, _, _ = socket.recv_fds(guest.line, LONGEST_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            said, given = b"", []
        try:
            if said and not guest.pid and not guest.ended:
                self._begin(guest, said, given)
                return
        finally:
            for descriptor in given:
                os.close(descriptor)
        self._leave(guest)

    def _begin(self, guest: Guest, said: bytes, given: list[int]) -> None:
        try:
            guest.pid = self._start(said, given)
            _tell(guest, {"pid": guest.pid})
        except _RefusedError as e:
            _tell(guest, {"error": str(e)})
            self._leave(guest)

    def _start(self, said: bytes, given: list[int]) -> int:
        """Raises _RefusedError."""
        asked = _parsed(said)
        rank = self._ranks.get(asked["rank"])
        if rank is None or len(given) != 3:
            raise _RefusedError(f"rank {asked['rank']} is none of this node")
        if sum(guest.pid > 0 for guest in self._guests) >= MOST:
            raise _RefusedError(f"{MOST} commands run beside this attempt already, the most at a time")
        environ = rank["environment"] | self._secrets | secret_names(self._secrets) | asked["environment"]
        command = asked["command"] or [_shell(environ)]
        group, me = self._group(), os.getpid()
        streams = given[0], given[1], given[2]
        try:
            with block_signals():
                lead = partial(_lead, me, asked["terminal"])
                return cgroup_spawn.start_with(command, environ, rank["folder"], group, lead, streams)
        except OSError as e:
            why = "its arguments are longer than the system takes" if e.errno == errno.E2BIG else e.strerror
            raise _RefusedError(f"cannot start {command[0][:200]!r}: {why}") from None
        finally:
            if group is not None:
                os.close(group)

    def reaped(self, pid: int, code: int) -> None:
        """A child that is no rank has ended; maybe it is one of ours."""
        for guest in self._guests:
            if guest.pid == pid and not guest.ended:
                guest.ended = True
                _tell(guest, {"code": code})

    def _leave(self, guest: Guest) -> None:
        """Nobody listens any more: what runs gets SIGHUP, and SIGKILL later."""
        self._close(guest)
        left = _session(guest.pid) if guest.pid else set()
        if not left:
            self._guests.discard(guest)
            return
        guest.kill_at_s = lease.now_s() + GRACE_S
        for pid in left:
            process_tree.send(pid, signal.SIGHUP)
            process_tree.send(pid, signal.SIGCONT)

    def processes(self) -> set[int]:
        """Those of all commands."""
        return set().union(*(_session(guest.pid) for guest in self._guests if guest.pid))

    def look(self) -> None:
        """Again and again: whom nobody listens to is killed after its grace."""
        now_s = lease.now_s()
        for guest in [g for g in self._guests if g.kill_at_s <= now_s]:
            process_tree.kill_tree(partial(_session, guest.pid))
            self._guests.discard(guest)

    def end(self) -> None:
        """All of them, at once, and no others are taken: the attempt ends."""
        if self._door is not None:
            self._selector.unregister(self._door)
            self._door.close()
            self._door = None
            with suppress(OSError):
                Path(DOOR).unlink()
        for guest in self._guests:
            self._close(guest)  # first: its end is then told as that of the attempt, not as one of its own
            if guest.pid:
                process_tree.kill_tree(partial(_session, guest.pid))
        self._guests.clear()

    def _close(self, guest: Guest) -> None:
        if guest.line.fileno() >= 0:
            self._selector.unregister(guest.line)
            guest.line.close()


class _RefusedError(Exception):
    """The sentence that whoever asked is told."""


def _parsed(said: bytes) -> dict[str, Any]:
    """Any process of this user can write here. Raises _RefusedError."""
    try:
        found = json.loads(said)
        return {
            "rank": int(found["rank"]),
            "command": [str(word) for word in found["command"]],
            "environment": {str(name): str(value) for name, value in found["environment"].items()},
            "terminal": bool(found["terminal"]),
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _RefusedError(
            "the agent's message cannot be read: agent and attempt may be of different versions"
        ) from None


def _shell(environ: dict[str, str]) -> str:
    asked = environ.get("SHELL", "")
    return asked if asked.startswith("/") and os.access(asked, os.X_OK) else "/bin/sh"


def _lead(parent: int, terminal: bool) -> None:
    """In the new child: a session of its own, which has the terminal, if it is one."""
    os.setsid()
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    before_exec(parent)


def _session(leader: int) -> set[int]:
    """Those living below us that are of the session which `leader` began, with all that they have started."""
    return process_tree.of_session(leader, os.getpid())


def _tell(guest: Guest, message: dict[str, Any]) -> None:
    with suppress(OSError):  # it has gone
        guest.line.send(json.dumps(message).encode())
