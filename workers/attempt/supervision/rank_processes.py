"""Start an attempt's ranks on one node, write their output to logs, and collect their exits in order."""

import errno
import os
import selectors
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from workers.attempt.supervision.rank_log import RankLog
from workers.processes import cgroup_spawn, process_tree
from workers.protocol import lease
from workers.protocol.redaction import NAMES_VARIABLE

DRAIN_S = 1.0
READ_BYTES = 64 << 10
TOO_LONG = "its command, env and secrets are longer than the system allows: 128 KiB each on Linux, together about 2 MiB"
SIGNALS = (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class RankStartError(Exception):
    """A rank that could not be started; `message` gives the system's reason."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class RankProcesses:
    """Processes of the ranks.

    `running`: ranks by pid; `codes` and `peaks`: exit codes and peak bytes of ended ranks. `log` opens the log of a
    rank, `on_output` is called at any output.
    """

    def __init__(self, secrets: dict[str, str], log: Callable[[int], RankLog], on_output: Callable[[], None]):
        self._secrets, self._log, self._on_output = secrets, log, on_output
        self._exit_pids: list[int] = []  # pids in the order of their exits, as far as the kernel reported them
        self.selector = selectors.DefaultSelector()
        self.logs: dict[int, RankLog] = {}
        self.running: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.peaks: dict[int, int] = {}

    def install_signal_handlers(self, on_signal: Callable[[int, Any], None]) -> None:
        """Let signals make `poll` return at once: when a rank exits, or the agent wakes us.

        Must be called before the agent can know our pid: an unhandled SIGUSR1 would kill this process.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        for number in SIGNALS:
            signal.signal(number, on_signal)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.selector.register(reader, selectors.EVENT_READ, None)

    def start(self, rank: dict[str, Any], group: int | None) -> None:
        """Start one rank in its own process group; the kernel kills it if we die. Raises RankStartError.

        `group`: descriptor of its control group.
        """
        number, me = rank["rank"], os.getpid()
        environ = rank["environment"] | self._secrets | secret_names(self._secrets)
        self.logs[number] = self._log(number)
        try:
            process = cgroup_spawn.start(rank["command"], environ, rank["folder"], group, lambda: before_exec(me))
        except OSError as e:
            reason = TOO_LONG if e.errno == errno.E2BIG else e.strerror
            raise RankStartError(f"rank {number} could not start {rank['command'][0][:200]!r}: {reason}") from None
        self.running[process.pid] = number
        with suppress(OSError, AttributeError):  # since Linux 5.3
            self.selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (number, process.pid))
        for stream, descriptor in (("out", process.stdout), ("err", process.stderr)):
            self.selector.register(descriptor, selectors.EVENT_READ, (number, stream))

    def poll(self, timeout_s: float) -> None:
        """Wait for output or a signal, and read one piece of each stream, so that none can starve others.

        The selector reports exits of ranks in their order. Callbacks that other modules registered are called.
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
                self._exit_pids.append(stream)
                self._close(key.fd)
                continue
            data = os.read(key.fd, READ_BYTES)
            if data:
                self._on_output()
                self.logs[number].feed(stream, data)
            else:
                self._close(key.fd)
                self.logs[number].end(stream)

    def flush(self) -> None:
        """Write unfinished lines of silent streams to the logs."""
        for log in self.logs.values():
            log.flush()

    def _close(self, descriptor: int) -> None:
        self.selector.unregister(descriptor)
        os.close(descriptor)

    def reap(self, on_other_exit: Callable[[int, int], None]) -> Iterator[tuple[int, int, int]]:
        """Yield (pid, rank, exit code) of all ranks that have ended, in the order of their exits.

        `on_other_exit` is called with pid and exit code of each other child: adopted orphans, and commands beside the
        ranks.
        """
        ended = []
        with suppress(ChildProcessError):
            while (exited := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = exited
                if (number := self.running.pop(pid, None)) is not None:
                    self.peaks[number] = usage.ru_maxrss * (1 << 10 if process_tree.LINUX else 1)
                    ended.append((pid, number, os.waitstatus_to_exitcode(status)))
                else:
                    on_other_exit(pid, os.waitstatus_to_exitcode(status))
        for pid, number, code in sorted(ended, key=self._exit_order):
            self.codes[number] = code
            yield pid, number, code

    def _exit_order(self, ended: tuple[int, int, int]) -> tuple[bool, int]:
        """Sort key for the order of exits: killed ranks first, then as the kernel reported them.

        The kernel closes a killed rank's files a moment before it reports the exit, and on a busy machine other ranks
        fail in that moment because they lost their connection to it.
        """
        pid, _, code = ended
        return code != -signal.SIGKILL, self._exit_pids.index(pid) if pid in self._exit_pids else len(self._exit_pids)

    def drain(self) -> None:
        """Read what is left in the pipes.

        Their writers have ended, unless a process outside the tree has one open.
        """
        deadline_s = lease.now_s() + DRAIN_S
        while len(self.selector.get_map()) > 1 and lease.now_s() < deadline_s:
            self.poll(0.05)
        for log in self.logs.values():
            log.close()

    def write_lines(self, lines: dict[int, list[str]]) -> None:
        """Write lines of ours into the logs of these ranks."""
        for number, texts in lines.items():
            self.logs[number].end("err")
            self.logs[number].feed("err", "".join(f"{line}\n" for line in texts).encode())


def secret_names(secrets: dict[str, str]) -> dict[str, str]:
    """The variable that lists which of a rank's variables are secrets."""
    return {NAMES_VARIABLE: ",".join(secrets)} if secrets else {}


@contextmanager
def block_signals() -> Iterator[None]:
    """Delay the handling of `SIGNALS` until the block ends."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def before_exec(parent: int) -> None:
    """Die with the supervisor, and restore the default signal handlers. For a new child, before exec."""
    process_tree.die_with_parent(parent)
    process_tree.set_oom_score(first=True)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
