"""Start supervisors that outlive the agent: by a fork server, or each in a new interpreter."""

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from cluster.errors import FleetError
from workers.attempt.rank_environment import supervisor_environment
from workers.attempt.supervision.fork_server import MAX_REQUEST_BYTES, READY
from workers.processes import process_tree
from workers.protocol.folders import AttemptFolder

START_TIMEOUT_S = 20.0
LOG = logging.getLogger(__name__)
SendSecrets = Callable[[Mapping[str, str]], None]


class SupervisorLauncher:
    """Starts the supervisors of one agent. Thread-safe.

    `start()` starts the fork server. Without it, and while it is not available, each supervisor is started in a new
    interpreter, and a lost fork server is started again for later ones.
    """

    def __init__(self) -> None:
        self._fork_server: _ForkServer | None = None
        self._lock = threading.Lock()

    @classmethod
    def start_new(cls) -> "SupervisorLauncher":
        launcher = cls()
        launcher.start()
        return launcher

    def start(self) -> None:
        if process_tree.LINUX:
            with self._lock, suppress(OSError):
                self._fork_server = _ForkServer()

    def close(self) -> None:
        with self._lock:
            if self._fork_server is not None:
                self._fork_server.kill()
            self._fork_server = None

    @contextmanager
    def supervisor(self, folder: AttemptFolder, lock: int) -> Iterator[SendSecrets]:
        """Start the supervisor, which inherits `lock`, while the caller prepares `folder` in the `with` block.

        Yields a function that passes the secrets, and so lets the supervisor begin. It returns once the supervisor is
        on record, else raises FleetError. A supervisor that gets no secrets exits.
        """
        with self._lock:
            fork_server = self._fork_server
        pipes = fork_server.request_supervisor(folder, lock) if fork_server is not None else None
        if fork_server is None or pipes is None:
            if fork_server is not None:
                self._replace(fork_server)
            with _new_interpreter(folder, lock) as send_secrets:
                yield send_secrets
            return
        try:
            yield partial(self._send_secrets, fork_server, pipes, folder.path.name)
        finally:
            pipes.close()

    def _send_secrets(self, fork_server: "_ForkServer", pipes: "_Pipes", name: str, secrets: Mapping[str, str]) -> None:
        try:
            reply = pipes.exchange(json.dumps(dict(secrets)).encode())
        except TimeoutError:
            pipes.close()  # a supervisor that starts later exits, as its pipes are closed
            self._replace(fork_server, hangs=True)
            raise _timeout_error() from None
        if not reply.endswith(READY):
            self._replace(fork_server)  # the fork server may be the reason why this supervisor failed
            raise _start_error(name, reply)

    def _replace(self, fork_server: "_ForkServer", *, hangs: bool = False) -> None:
        """Start another fork server. Unless the old one `hangs`, it still handles the requests that it has."""
        LOG.warning(
            "the fork server %d of supervisors has exited or does not respond: another one is started", fork_server.pid
        )
        if hangs:
            fork_server.kill()
        else:
            fork_server.retire()
        with self._lock:
            if self._fork_server is fork_server:
                self._fork_server = None
                with suppress(OSError):
                    self._fork_server = _ForkServer()


class _Pipes(NamedTuple):
    """Our ends of a supervisor's pipes: to write its secrets, and to read its reply."""

    secrets: int
    reply: int
    closed: list[int]

    def exchange(self, secrets: bytes) -> bytes:
        """Send the secrets and return the complete reply. Raises TimeoutError."""
        with suppress(BrokenPipeError):  # it has exited: its reply has the reason
            self._write(secrets)
        self._close(self.secrets)
        reply = b""
        while True:
            _wait(self.reply, select.POLLIN)
            piece = os.read(self.reply, 1 << 16)
            reply += piece
            if not piece:
                return reply

    def _write(self, data: bytes) -> None:
        while data:
            _wait(self.secrets, select.POLLOUT)
            data = data[os.write(self.secrets, data[: select.PIPE_BUF]) :]

    def _close(self, descriptor: int) -> None:
        if descriptor not in self.closed:
            self.closed.append(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        self._close(self.secrets)
        self._close(self.reply)


def _wait(descriptor: int, event: int) -> None:
    """Wait until a descriptor is ready.

    Raises TimeoutError. (`select.select` refuses descriptors from 1,024 on.)
    """
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(START_TIMEOUT_S * 1000):
        raise TimeoutError


class _ForkServer:
    def __init__(self) -> None:
        self._socket, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_TIMEOUT_S)
        with server_end:
            command = [
                sys.executable,
                *LEAN,
                "-m",
                "workers.attempt.supervision.fork_server",
                str(server_end.fileno()),
                "x" * MAX_REQUEST_BYTES,
            ]
            self._child = subprocess.Popen(
                command, env=supervisor_environment(os.environ), cwd="/", pass_fds=(server_end.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self.pid = self._child.pid
        self.kill = weakref.finalize(self, _kill, self._child, self._socket)

    def retire(self) -> None:
        """Send no more requests: it exits after the last one. A thread waits for its exit."""
        with suppress(OSError):  # it has exited
            self._socket.shutdown(socket.SHUT_WR)
        threading.Thread(target=self._wait, name="zygote", daemon=True).start()

    def _wait(self) -> None:
        """Wait for its exit.

        The running thread keeps this object alive, whose finalizer would kill the process.
        """
        self._child.wait()

    def request_supervisor(self, folder: AttemptFolder, lock: int) -> _Pipes | None:
        """Request a supervisor; None if the fork server has exited."""
        secrets_out, secrets = os.pipe()
        reply, reply_in = os.pipe()
        request = os.fsencode(folder.path)
        try:
            if len(request) > MAX_REQUEST_BYTES:
                raise OSError("the path is too long for a request")
            socket.send_fds(self._socket, [request], [lock, secrets_out, reply_in])
        except OSError:
            os.close(secrets)
            os.close(reply)
            return None
        finally:
            os.close(secrets_out)
            os.close(reply_in)
        return _Pipes(secrets, reply, [])


# Without site-packages Python starts in half the time; elsewhere than on Linux a supervisor needs psutil.
LEAN = ["-S", "-s", "-P"] if process_tree.LINUX else ["-s", "-P"]


def _kill(child: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    """Kill a fork server, with SIGKILL as it may be stopped.

    Supervisors that it forked are not its children.
    """
    connection.close()
    child.kill()
    child.wait()


@contextmanager
def _new_interpreter(folder: AttemptFolder, lock: int) -> Iterator[SendSecrets]:
    """Start a supervisor in a new interpreter.

    That takes longer than the caller needs to prepare the folder.
    """
    with subprocess.Popen(
        [sys.executable, *LEAN, "-m", "workers.attempt", str(folder.path), str(lock)],
        env=supervisor_environment(os.environ), cwd=folder.path, pass_fds=(lock,), start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        try:
            yield partial(_send_secrets, child, folder.path.name)
        except BaseException:
            child.kill()
            raise


def _send_secrets(child: "subprocess.Popen[bytes]", name: str, secrets: Mapping[str, str]) -> None:
    try:
        _, stderr = child.communicate(json.dumps(dict(secrets)).encode(), timeout=START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _timeout_error() from None
    if child.returncode:
        raise _start_error(name, stderr)


def _timeout_error() -> FleetError:
    return FleetError(
        f"the supervisor did not start within {START_TIMEOUT_S:.0f} s: the node is overloaded",
        "nothing to do: the server retries the start",
    )


def _start_error(name: str, output: bytes) -> FleetError:
    last_line = (output.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    return FleetError(
        f"the supervisor of {name} did not start: {last_line}", "check that node's disk, memory and Python environment"
    )
