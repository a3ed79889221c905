"""The processes of an attempt's ranks on one node: started, their output written to logs, their ends seen in order."""

import errno
import os
import selectors
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from workers.attempt import cgroup_spawn, lease, process_tree
from workers.attempt.rank_log import RankLog
from workers.attempt.redaction import NAMES

DRAIN_S = 1.0
READ_BYTES = 64 << 10
TOO_LONG = "its command, env and secrets are longer than the system takes: 128 KiB each on Linux, together about 2 MiB"
SIGNALS = (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class RankStartError(Exception):
    """`message` says what the system refused."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class RankProcesses:
    """`running` has ranks by pid, `codes` and `peaks` (bytes) those that ended.

    `log` opens the log of a rank, `heard` is called at any output.
    """

    def __init__(self, secrets: dict[str, str], log: Callable[[int], RankLog], heard: Callable[[], None]):
        self._secrets, self._log, self._heard = secrets, log, heard
        self._ends: list[int] = []  # pids in the order of their ends, as far as the kernel told
        self.selector = selectors.DefaultSelector()
        self.logs: dict[int, RankLog] = {}
        self.running: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.peaks: dict[int, int] = {}

    def listen(self, signalled: Callable[[int, Any], None]) -> None:
        """A signal makes `turn` return at once: a rank's end and an agent's word are seen in milliseconds.

        Comes before anybody can know our pid: an unhandled SIGUSR1 would end us.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        for number in SIGNALS:
            signal.signal(number, signalled)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.selector.register(reader, selectors.EVENT_READ, None)

    def start(self, rank: dict[str, Any], group: int | None) -> None:
        """One rank in a process group of its own, which the kernel kills if we die. `group`: its control group.

        Raises RankStartError.
        """
        number, me = rank["rank"], os.getpid()
        environ = rank["environment"] | self._secrets | secret_names(self._secrets)
        self.logs[number] = self._log(number)
        try:
            it = cgroup_spawn.start(rank["command"], environ, rank["folder"], group, lambda: before_exec(me))
        except OSError as e:
            why = TOO_LONG if e.errno == errno.E2BIG else e.strerror
            raise RankStartError(f"rank {number} could not start {rank['command'][0][:200]!r}: {why}") from None
        self.running[it.pid] = number
        with suppress(OSError, AttributeError):  # since Linux 5.3
            self.selector.register(os.pidfd_open(it.pid), selectors.EVENT_READ, (number, it.pid))
        for stream, descriptor in (("out", it.out), ("err", it.err)):
            self.selector.register(descriptor, selectors.EVENT_READ, (number, stream))

    def turn(self, timeout_s: float) -> None:
        """Wait for output or a signal, and take one piece of each stream: a rank that floods cannot starve the rest.

        The selector tells ends of ranks in the order in which they came. What others registered is called.
        """
        for key, _ in self.selector.select(timeout_s):
            if key.data is None:
                os.read(key.fd, 4096)
                continue
            if callable(key.data):
                key.data()
                continue
            number, stream = key.data
            if isinstance(stream, int):
                self._ends.append(stream)
                self._close(key.fd)
                continue
            data = os.read(key.fd, READ_BYTES)
            if data:
                self._heard()
                self.logs[number].feed(stream, data)
            else:
                self._close(key.fd)
                self.logs[number].end(stream)

    def flush(self) -> None:
        """Unfinished lines of streams that are silent go to the logs."""
        for log in self.logs.values():
            log.flush()

    def _close(self, descriptor: int) -> None:
        self.selector.unregister(descriptor)
        os.close(descriptor)

    def reap(self, other: Callable[[int, int], None]) -> Iterator[tuple[int, int, int]]:
        """All ranks that ended: (pid, rank, exit code) in the order of their ends. `other` gets pid and exit code of
        each other child: adopted orphans, and commands beside the ranks.
        """
        ended = []
        with suppress(ChildProcessError):
            while (found := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = found
                if (number := self.running.pop(pid, None)) is not None:
                    self.peaks[number] = usage.ru_maxrss * (1 << 10 if process_tree.LINUX else 1)
                    ended.append((pid, number, os.waitstatus_to_exitcode(status)))
                else:
                    other(pid, os.waitstatus_to_exitcode(status))
        for pid, number, code in sorted(ended, key=self._when):
            self.codes[number] = code
            yield pid, number, code

    def _when(self, ended: tuple[int, int, int]) -> tuple[bool, int]:
        """A rank that was killed went before those that lost their connection to it: its files are closed a moment
        before the kernel tells its end, and on a busy machine sisters end in that moment.
        """
        pid, _, code = ended
        return code != -signal.SIGKILL, self._ends.index(pid) if pid in self._ends else len(self._ends)

    def drain(self) -> None:
        """What is still in the pipes. Their writers are dead, unless somebody outside the tree holds one open."""
        until = lease.now_s() + DRAIN_S
        while len(self.selector.get_map()) > 1 and lease.now_s() < until:
            self.turn(0.05)
        for log in self.logs.values():
            log.close()

    def tell(self, lines: dict[int, list[str]]) -> None:
        """Put lines of ours into the logs of those ranks."""
        for number, told in lines.items():
            self.logs[number].end("err")
            self.logs[number].feed("err", "".join(f"{line}\n" for line in told).encode())


def secret_names(secrets: dict[str, str]) -> dict[str, str]:
    """The variable that tells a rank which of its variables are secrets."""
    return {NAMES: ",".join(secrets)} if secrets else {}


@contextmanager
def block_signals() -> Iterator[None]:
    """Signals of `SIGNALS` that come meanwhile are handled when it is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def before_exec(parent: int) -> None:
    """In the new child: die with the supervisor, and start with the signals a program expects."""
    process_tree.die_with(parent)
    process_tree.killed_for_memory(first=True)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
