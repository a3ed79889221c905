"""Starts supervisors that live on without us: forked by a zygote if there is one, else each in a new interpreter."""

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
from workers.attempt import process_tree
from workers.attempt.folders import AttemptFolder
from workers.attempt.fork_server import LONGEST_REQUEST, READY
from workers.attempt.rank_environment import supervisor_environment

START_TIMEOUT_S = 20.0
LOG = logging.getLogger(__name__)
Begin = Callable[[Mapping[str, str]], None]


class SupervisorLauncher:
    """Of one agent. `begin()` starts the zygote; without, and whenever it is gone, supervisors are started one by one,
    and the zygote anew for those after. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._zygote: _ForkServer | None = None
        self._lock = threading.Lock()

    @classmethod
    def begun(cls) -> "SupervisorLauncher":
        it = cls()
        it.begin()
        return it

    def begin(self) -> None:
        if process_tree.LINUX:
            with self._lock, suppress(OSError):
                self._zygote = _ForkServer()

    def close(self) -> None:
        with self._lock:
            if self._zygote is not None:
                self._zygote.end()
            self._zygote = None

    @contextmanager
    def supervisor(self, folder: AttemptFolder, lock: int) -> Iterator[Begin]:
        """Start the supervisor, which inherits `lock`, while `folder` is being prepared.

        What is yielded lets it begin, with the secrets, and returns once it is on record; it raises FleetError
        otherwise. A supervisor that was never let begin ends.
        """
        with self._lock:
            zygote = self._zygote
        pipes = zygote.ask(folder, lock) if zygote is not None else None
        if zygote is None or pipes is None:
            if zygote is not None:
                self._replace(zygote)
            with _interpreter(folder, lock) as begin:
                yield begin
            return
        try:
            yield partial(self._begun, zygote, pipes, folder.path.name)
        finally:
            pipes.close()

    def _begun(self, zygote: "_ForkServer", pipes: "_Pipes", name: str, secrets: Mapping[str, str]) -> None:
        try:
            said = pipes.exchange(json.dumps(dict(secrets)).encode())
        except TimeoutError:
            pipes.close()  # a supervisor that comes later ends, since nobody listens
            self._replace(zygote, hangs=True)
            raise _overloaded() from None
        if not said.endswith(READY):
            self._replace(zygote)  # what ended this supervisor may be wrong with it
            raise _not_started(name, said)

    def _replace(self, zygote: "_ForkServer", *, hangs: bool = False) -> None:
        """What it was asked for beside, it still starts, unless it `hangs`."""
        LOG.warning("the zygote %d of supervisors is gone or does not answer: it is started again", zygote.pid)
        if hangs:
            zygote.end()
        else:
            zygote.retire()
        with self._lock:
            if self._zygote is zygote:
                self._zygote = None
                with suppress(OSError):
                    self._zygote = _ForkServer()


class _Pipes(NamedTuple):
    """Our ends: secrets go into one, and the supervisor's answer comes out of the other."""

    secrets: int
    said: int
    closed: list[int]

    def exchange(self, secrets: bytes) -> bytes:
        """All that it says. Raises TimeoutError."""
        with suppress(BrokenPipeError):  # it has ended: its last words tell why
            self._write(secrets)
        self._close(self.secrets)
        said = b""
        while True:
            _wait(self.said, select.POLLIN)
            piece = os.read(self.said, 1 << 16)
            said += piece
            if not piece:
                return said

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
        self._close(self.said)


def _wait(descriptor: int, what: int) -> None:
    """Until it can be read or written. Raises TimeoutError. (`select.select` refuses descriptors from 1,024 on.)"""
    poll = select.poll()
    poll.register(descriptor, what)
    if not poll.poll(START_TIMEOUT_S * 1000):
        raise TimeoutError


class _ForkServer:
    def __init__(self) -> None:
        self._door, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.settimeout(START_TIMEOUT_S)
        with inside:
            command = [
                sys.executable,
                *LEAN,
                "-m",
                "workers.attempt.fork_server",
                str(inside.fileno()),
                "x" * LONGEST_REQUEST,
            ]
            self._child = subprocess.Popen(
                command, env=supervisor_environment(os.environ), cwd="/", pass_fds=(inside.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self.pid = self._child.pid
        self.end = weakref.finalize(self, _end, self._child, self._door)

    def retire(self) -> None:
        """Ask it no more: it ends with the last request. It is waited for in the background."""
        with suppress(OSError):  # it is gone
            self._door.shutdown(socket.SHUT_WR)
        threading.Thread(target=self._wait, name="zygote", daemon=True).start()

    def _wait(self) -> None:
        """Our being alive keeps it from being ended as one that nobody needs."""
        self._child.wait()

    def ask(self, folder: AttemptFolder, lock: int) -> _Pipes | None:
        """None when it is gone."""
        secrets_out, secrets = os.pipe()
        said, said_in = os.pipe()
        request = os.fsencode(folder.path)
        try:
            if len(request) > LONGEST_REQUEST:
                raise OSError("the path is too long for a request")
            socket.send_fds(self._door, [request], [lock, secrets_out, said_in])
        except OSError:
            os.close(secrets)
            os.close(said)
            return None
        finally:
            os.close(secrets_out)
            os.close(said_in)
        return _Pipes(secrets, said, [])


# Without site-packages Python starts in half the time; elsewhere than on Linux a supervisor needs psutil.
LEAN = ["-S", "-s", "-P"] if process_tree.LINUX else ["-s", "-P"]


def _end(child: "subprocess.Popen[bytes]", door: socket.socket) -> None:
    """By signal 9: it may be stopped. What it has forked has left it."""
    door.close()
    child.kill()
    child.wait()


@contextmanager
def _interpreter(folder: AttemptFolder, lock: int) -> Iterator[Begin]:
    """An interpreter takes longer than the folder, which is made meanwhile."""
    with subprocess.Popen(
        [sys.executable, *LEAN, "-m", "workers.attempt", str(folder.path), str(lock)],
        env=supervisor_environment(os.environ), cwd=folder.path, pass_fds=(lock,), start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        try:
            yield partial(_begun, child, folder.path.name)
        except BaseException:
            child.kill()
            raise


def _begun(child: "subprocess.Popen[bytes]", name: str, secrets: Mapping[str, str]) -> None:
    try:
        _, said = child.communicate(json.dumps(dict(secrets)).encode(), timeout=START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _overloaded() from None
    if child.returncode:
        raise _not_started(name, said)


def _overloaded() -> FleetError:
    return FleetError(f"the supervisor did not start within {START_TIMEOUT_S:.0f} s", "the node is overloaded")


def _not_started(name: str, said: bytes) -> FleetError:
    last = (said.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    return FleetError(f"the supervisor of {name} did not start: {last}", "see the agent's node")
