"""Processes we start, known by pid and start time, so that a recycled pid is never signalled.

Others are looked for by their exact command line and only among those of our own user: whoever merely has our paths in
the arguments, or is somebody else, is never taken for ours.
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
"""Between two readings of a start in epoch seconds: where no other is had, and in records of older versions."""
PRIVATE_UMASK = 0o077
KILLED_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """`created` is when it started, as `start_of` tells it. Records of older versions hold epoch seconds."""

    pid: int
    created: str | float


def identify(pid: int) -> ProcessId:
    """Raises psutil.NoSuchProcess when it is already gone."""
    return ProcessId(pid, start_of(pid))


def start_of(pid: int) -> str | float:
    """On Linux the boot's id and the clock ticks from boot to start: epoch seconds, as psutil tells them, move with
    every step of the clock. Elsewhere epoch seconds, which the kernel keeps. Raises psutil.NoSuchProcess.
    """
    return f"{_boot_id()}:{_ticks(pid)}" if LINUX else float(psutil.Process(pid).create_time())


def age_s(process: ProcessId) -> float:
    """Seconds since it started, 0.0 once it is gone."""
    with suppress(psutil.NoSuchProcess):
        if LINUX:
            return time.clock_gettime(time.CLOCK_BOOTTIME) - _ticks(process.pid) / os.sysconf("SC_CLK_TCK")
        return time.time() - float(psutil.Process(process.pid).create_time())
    return 0.0


@cache
def _boot_id() -> str:
    return BOOT_ID.read_text().strip()


def _ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat; the command's name, which may hold anything, stands in brackets before."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        raise psutil.NoSuchProcess(pid) from None


def find(process: ProcessId) -> psutil.Process | None:
    """The living process, or None: gone, a zombie, or another one under the same pid."""
    try:
        found = psutil.Process(process.pid)
        return found if _same_start(found, process.created) and _runs(found) else None
    except psutil.Error:
        return None


def _same_start(found: psutil.Process, created: str | float) -> bool:
    if isinstance(created, str):
        return start_of(found.pid) == created
    return abs(found.create_time() - created) < SAME_START_S


def alive(process: ProcessId) -> bool:
    return find(process) is not None


def start_detached(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> ProcessId:
    """Start in a session of its own, output appended to `log`, so that it outlives us and our terminal.

    What it makes is its owner's alone, whatever our umask.
    """
    with open_private(log, os.O_WRONLY | os.O_APPEND) as output:
        child = subprocess.Popen(
            argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, umask=PRIVATE_UMASK,
        )  # fmt: skip
    child.returncode = 0  # it is meant to outlive us: Popen shall neither wait for it nor warn
    return identify(child.pid)


def current_process() -> Iterator[psutil.Process]:
    """All living processes of our own user but this one. Root sees everybody's, and is nobody's owner but its own."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            uids = process.uids()
            if uids.real == uids.effective == os.geteuid() and process.pid != os.getpid() and _runs(process):
                yield process


def processes_of_module(module: str) -> Iterator[tuple[ProcessId, list[str]]]:
    """Processes of our own user that are `python [flags] -m module ...`, with the arguments after the module."""
    for process in current_process():
        with suppress(psutil.Error):
            found, words = identify(process.pid), process.cmdline()
            at = words.index("-m") if "-m" in words else 0
            exact = at and words[at + 1 : at + 2] == [module] and all(word.startswith("-") for word in words[1:at])
            if exact and Path(process.exe()).name.lower().startswith("python"):
                yield found, words[at + 2 :]


def with_descendants(processes: Iterable[ProcessId]) -> list[psutil.Process]:
    """The living ones among `processes`, then all their descendants."""
    roots = [found for p in processes if (found := find(p))]
    members = {p.pid: p for p in roots}
    for root in roots:
        with suppress(psutil.Error):
            members.update((child.pid, child) for child in root.children(recursive=True))
    return list(members.values())


def stop(processes: Iterable[ProcessId], grace_s: float = 10.0, spare: Iterable[ProcessId] = ()) -> int:
    """SIGTERM, wait, then SIGKILL for them and all their descendants. Returns how many had to be killed.

    `spare` and their descendants live on: what a server started for good is still its child.
    """
    roots = [p for p in processes if alive(p)]
    everyone = _members(roots, {p.pid for p in with_descendants(spare)})
    for process in roots:
        _send(process, signal.SIGTERM)
    left = _wait(everyone, grace_s)
    for process in left:
        _send(process, signal.SIGKILL)
    _wait(left, max(grace_s, KILLED_S))
    return len(left)


def _members(roots: Iterable[ProcessId], spared: Container[int] = ()) -> list[ProcessId]:
    """The living ones of `family`, known by their start as well."""
    found = []
    for member in with_descendants(roots):
        with suppress(psutil.Error):
            if member.pid not in spared:
                found.append(identify(member.pid))
    return found


def kill_trees(processes: Iterable[ProcessId]) -> None:
    """SIGKILL for them and all their descendants, none of which hears anything before; wait for their end."""
    everyone = _members(processes)
    kill(everyone)
    _wait(everyone, KILLED_S)


def kill(processes: Iterable[ProcessId]) -> bool:
    """SIGKILL for them alone, without waiting. Whether one of them lived."""
    living = [p for p in processes if alive(p)]
    for process in living:
        _send(process, signal.SIGKILL)
    return bool(living)


def _send(process: ProcessId, number: signal.Signals) -> None:
    with suppress(psutil.Error):
        if found := find(process):
            found.send_signal(number)


def _wait(processes: list[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Those that still run after `timeout_s`. A zombie has ended; who collects it is not our concern."""
    deadline = time.monotonic() + timeout_s
    while (processes := [p for p in processes if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return processes


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def terminate(processes: Iterable[ProcessId]) -> None:
    """Collect those of them that are ended children of ours, so that a long-lived caller keeps no zombies."""
    for process in processes:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def free_port() -> int:
    """A TCP port nobody listens on now. Somebody may take it before you do: be ready to try again."""
    with closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
