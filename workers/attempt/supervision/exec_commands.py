"""Run the commands of `polyfleet exec` and `polyfleet shell` beside the ranks of an attempt.

The supervisor starts them, so that they belong to the attempt's process tree and control group and end with it, however
they change their environment. They see what a rank sees but are not ranks: their exit does not end the attempt, and
they do not keep it running. The agent sends a request with the command's stdin, stdout and stderr through a socket in
the attempt's folder; the connection stays open while the command runs, and returns its exit code. When the agent closes
it, the command and its child processes are killed. Standard library only, as the supervisor.
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

from workers.attempt.supervision.rank_processes import before_exec, block_signals, secret_names
from workers.processes import cgroup_spawn, process_tree
from workers.protocol import lease

SOCKET_NAME = "door"
"""File name of the socket in the attempt's record folder. That is the supervisor's working directory, so a relative
path is enough: a socket's path must be short."""
MAX_COMMANDS = 8
"""Maximum number of commands at a time in one attempt on one node."""
MAX_COMMAND_BYTES = 128 << 10
GRACE_S = 2.0
"""Time between SIGHUP and SIGKILL after the agent has closed the connection."""


@dataclass(eq=False)
class ExecConnection:
    """A connection from the agent.

    `pid`: its command, which leads a session; 0 before it has requested one.
    """

    connection: socket.socket
    pid: int = 0
    has_ended: bool = False
    kill_at_s: float = float("inf")


class ExecCommands:
    """Starts and ends the commands. Not thread-safe.

    `ranks` are those of the launch record; `group` opens the control group, or returns None.
    """

    def __init__(
        self,
        ranks: list[dict[str, Any]],
        secrets: dict[str, str],
        group: Callable[[], int | None],
        selector: selectors.BaseSelector,
    ):
        self._ranks = {int(rank["rank"]): rank for rank in ranks}
        self._secrets, self._group, self._selector = secrets, group, selector
        self._socket: socket.socket | None = None
        self._connections: set[ExecConnection] = set()

    def open(self) -> None:
        """Start to accept commands, on Linux and if the disk has space for the socket."""
        if not process_tree.LINUX:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(SOCKET_NAME)
            Path(SOCKET_NAME).chmod(0o600)
            listener.listen(MAX_COMMANDS)
        except OSError:
            listener.close()
            return
        listener.setblocking(False)
        self._socket = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        with suppress(OSError):
            line, _ = self._socket.accept()
            line.setblocking(False)
            client = ExecConnection(line)
            self._connections.add(client)
            self._selector.register(line, selectors.EVENT_READ, lambda: self._receive(client))

    def _receive(self, client: ExecConnection) -> None:
        """Read a request, or notice that the agent has closed the connection."""
        try:
            data, descriptors, _, _ = socket.recv_fds(client.connection, MAX_COMMAND_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        try:
            if data and not client.pid and not client.has_ended:
                self._try_start(client, data, descriptors)
                return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._disconnect(client)

    def _try_start(self, client: ExecConnection, data: bytes, descriptors: list[int]) -> None:
        try:
            client.pid = self._start(data, descriptors)
            _send(client, {"pid": client.pid})
        except _RefusedError as e:
            _send(client, {"error": str(e)})
            self._disconnect(client)

    def _start(self, data: bytes, descriptors: list[int]) -> int:
        """Start the requested command and return its pid. Raises _RefusedError."""
        request = _parse_request(data)
        rank = self._ranks.get(request["rank"])
        if rank is None or len(descriptors) != 3:
            raise _RefusedError(f"rank {request['rank']} does not run on this node")
        if sum(client.pid > 0 for client in self._connections) >= MAX_COMMANDS:
            raise _RefusedError(f"{MAX_COMMANDS} commands run beside this attempt already, the maximum")
        environ = rank["environment"] | self._secrets | secret_names(self._secrets) | request["environment"]
        command = request["command"] or [_shell(environ)]
        group, me = self._group(), os.getpid()
        streams = descriptors[0], descriptors[1], descriptors[2]
        try:
            with block_signals():
                start_session = partial(_start_session, me, request["terminal"])
                return cgroup_spawn.start_with_streams(command, environ, rank["folder"], group, start_session, streams)
        except OSError as e:
            reason = "its arguments are longer than the system allows" if e.errno == errno.E2BIG else e.strerror
            raise _RefusedError(f"cannot start {command[0][:200]!r}: {reason}") from None
        finally:
            if group is not None:
                os.close(group)

    def on_exit(self, pid: int, code: int) -> None:
        """Send the exit code to the client if the child that has ended is a command."""
        for client in self._connections:
            if client.pid == pid and not client.has_ended:
                client.has_ended = True
                _send(client, {"code": code})

    def _disconnect(self, client: ExecConnection) -> None:
        """Close the connection and send SIGHUP to its command; `kill_overdue` sends SIGKILL later."""
        self._close(client)
        processes = _session_processes(client.pid) if client.pid else set()
        if not processes:
            self._connections.discard(client)
            return
        client.kill_at_s = lease.now_s() + GRACE_S
        for pid in processes:
            process_tree.send(pid, signal.SIGHUP)
            process_tree.send(pid, signal.SIGCONT)

    def processes(self) -> set[int]:
        """Processes of all commands."""
        return set().union(*(_session_processes(client.pid) for client in self._connections if client.pid))

    def kill_overdue(self) -> None:
        """Kill commands whose grace time after SIGHUP has passed. Called regularly."""
        now_s = lease.now_s()
        for client in [g for g in self._connections if g.kill_at_s <= now_s]:
            process_tree.kill_tree(partial(_session_processes, client.pid))
            self._connections.discard(client)

    def kill_all(self) -> None:
        """Kill all commands at once and accept no others: the attempt ends."""
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None
            with suppress(OSError):
                Path(SOCKET_NAME).unlink()
        for client in self._connections:
            self._close(client)  # before the kill, so that the agent sends the end of the attempt, not an exit code
            if client.pid:
                process_tree.kill_tree(partial(_session_processes, client.pid))
        self._connections.clear()

    def _close(self, client: ExecConnection) -> None:
        if client.connection.fileno() >= 0:
            self._selector.unregister(client.connection)
            client.connection.close()


class _RefusedError(Exception):
    """A request that is refused; its text is sent to the agent."""


def _parse_request(data: bytes) -> dict[str, Any]:
    """Parse a request, which any process of this user may have sent. Raises _RefusedError."""
    try:
        fields = json.loads(data)
        return {
            "rank": int(fields["rank"]),
            "command": [str(argument) for argument in fields["command"]],
            "environment": {str(name): str(value) for name, value in fields["environment"].items()},
            "terminal": bool(fields["terminal"]),
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _RefusedError(
            "the agent's request cannot be read: agent and attempt may be of different versions"
        ) from None


def _shell(environ: dict[str, str]) -> str:
    shell = environ.get("SHELL", "")
    return shell if shell.startswith("/") and os.access(shell, os.X_OK) else "/bin/sh"


def _start_session(parent: int, terminal: bool) -> None:
    """Start a session, and make stdin its controlling terminal if `terminal`.

    For a new child, before exec.
    """
    os.setsid()
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    before_exec(parent)


def _session_processes(leader: int) -> set[int]:
    """Running processes below this one in the session of `leader`, and all their descendants."""
    return process_tree.session_processes(leader, os.getpid())


def _send(client: ExecConnection, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the agent has closed the connection
        client.connection.send(json.dumps(message).encode())
