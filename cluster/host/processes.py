"""Start, find and stop processes.

A process is identified by its pid and start time, so that a reused pid is never signalled. Processes that are not
recorded are searched by their exact command line, among those of our own user only. A process that merely has our paths
in its arguments, or belongs to another user, is never mistaken for ours.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from cluster.paths import open_private

LINUX = sys.platform == "linux"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAME_START_S = 1.0
"""Tolerance between two readings of a start time in epoch seconds, on systems without ticks."""
PRIVATE_UMASK = 0o077
KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process.

    `created` is its start time from `start_of`.
    """

    pid: int
    created: str | float


def identify(pid: int) -> ProcessId:
    """Return the ProcessId of a running process. Raises psutil.NoSuchProcess if it has ended."""
    return ProcessId(pid, start_of(pid))


def start_of(pid: int) -> str | float:
    """Return a process's start time, which identifies it together with the pid.

    Raises psutil.NoSuchProcess.

    On Linux it consists of the boot's id and the clock ticks from boot to start: epoch seconds, as psutil returns them,
    change with every step of the clock. Elsewhere it is epoch seconds, which the kernel stores.
    """
    return f"{_boot_id()}:{_ticks(pid)}" if LINUX else float(psutil.Process(pid).create_time())


def age_s(process: ProcessId) -> float:
    """Return the seconds since the process started, 0.0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        if LINUX:
            return time.clock_gettime(time.CLOCK_BOOTTIME) - _ticks(process.pid) / os.sysconf("SC_CLK_TCK")
        return time.time() - float(psutil.Process(process.pid).create_time())
    return 0.0


@cache
def _boot_id() -> str:
    return BOOT_ID.read_text().strip()


def _ticks(pid: int) -> int:
    """Read field 22 of /proc/PID/stat.

    It is behind the command's name in brackets, which may contain anything.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        raise psutil.NoSuchProcess(pid) from None


def find(process: ProcessId) -> psutil.Process | None:
    """Return the running process, or None if it has ended, is a zombie, or another process has its pid."""
    try:
        candidate = psutil.Process(process.pid)
        return candidate if _same_start(candidate, process.created) and _is_running(candidate) else None
    except psutil.Error:
        return None


def _same_start(process: psutil.Process, created: str | float) -> bool:
    if isinstance(created, str):
        return start_of(process.pid) == created
    return abs(process.create_time() - created) < SAME_START_S


def is_alive(process: ProcessId) -> bool:
    return find(process) is not None


def start_detached(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> ProcessId:
    """Start a process in its own session, so that it outlives this process and its terminal.

    Its output is appended to `log`. Files that it creates are accessible to their owner only, whatever our umask.
    """
    with open_private(log, os.O_WRONLY | os.O_APPEND) as output:
        child = subprocess.Popen(
            argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, umask=PRIVATE_UMASK,
        )  # fmt: skip
    child.returncode = 0  # it is meant to outlive us: Popen must neither wait for it nor warn
    return identify(child.pid)


def other_own_processes() -> Iterator[psutil.Process]:
    """Yield the running processes of our own user, except this one. For root, only root's own processes."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            uids = process.uids()
            if uids.real == uids.effective == os.geteuid() and process.pid != os.getpid() and _is_running(process):
                yield process


def processes_of_module(module: str) -> Iterator[tuple[ProcessId, list[str]]]:
    """Yield our user's processes `python [flags] -m module ...`, with the arguments after the module."""
    for process in other_own_processes():
        with suppress(psutil.Error):
            process_id, arguments = identify(process.pid), process.cmdline()
            position = arguments.index("-m") if "-m" in arguments else 0
            is_exact = (
                position
                and arguments[position + 1 : position + 2] == [module]
                and all(argument.startswith("-") for argument in arguments[1:position])
            )
            if is_exact and Path(process.exe()).name.lower().startswith("python"):
                yield process_id, arguments[position + 2 :]


def with_descendants(processes: Iterable[ProcessId]) -> list[psutil.Process]:
    """Return the running ones of `processes`, then all their descendants."""
    roots = [running for p in processes if (running := find(p))]
    members = {p.pid: p for p in roots}
    for root in roots:
        with suppress(psutil.Error):
            members.update((child.pid, child) for child in root.children(recursive=True))
    return list(members.values())


def stop(processes: Iterable[ProcessId], grace_s: float = 10.0, exclude: Iterable[ProcessId] = ()) -> int:
    """Stop processes and their descendants: SIGTERM, wait, then SIGKILL.

    Returns how many had to be killed.

    `exclude` and their descendants keep running: processes that a server started to outlive it are still its children.
    """
    roots = [p for p in processes if is_alive(p)]
    members = _members(roots, {p.pid for p in with_descendants(exclude)})
    for process in roots:
        _send(process, signal.SIGTERM)
    remaining = _wait(members, grace_s)
    for process in remaining:
        _send(process, signal.SIGKILL)
    _wait(remaining, max(grace_s, KILL_TIMEOUT_S))
    return len(remaining)


def _members(roots: Iterable[ProcessId], excluded: Container[int] = ()) -> list[ProcessId]:
    """Return the running ones of `with_descendants`, identified by their start time as well."""
    members = []
    for member in with_descendants(roots):
        with suppress(psutil.Error):
            if member.pid not in excluded:
                members.append(identify(member.pid))
    return members


def kill_trees(processes: Iterable[ProcessId]) -> None:
    """Kill processes and all their descendants, without an earlier signal, and wait for their end."""
    members = _members(processes)
    kill(members)
    _wait(members, KILL_TIMEOUT_S)


def kill(processes: Iterable[ProcessId]) -> bool:
    """Send SIGKILL to the processes alone, without waiting. Returns whether one of them was running."""
    running = [p for p in processes if is_alive(p)]
    for process in running:
        _send(process, signal.SIGKILL)
    return bool(running)


def _send(process: ProcessId, number: signal.Signals) -> None:
    with suppress(psutil.Error):
        if running := find(process):
            running.send_signal(number)


def _wait(processes: list[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Return the processes that still run after `timeout_s`. A zombie has ended."""
    deadline = time.monotonic() + timeout_s
    while (processes := [p for p in processes if is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return processes


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def reap(processes: Iterable[ProcessId]) -> None:
    """Reap those that are ended children of this process, so that a long-lived caller has no zombies."""
    for process in processes:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def free_port() -> int:
    """Return a free TCP port. Another process may take it before the caller does: be ready to retry."""
    with closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
