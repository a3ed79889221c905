"""Processes we start, known by pid and start time, so that a recycled pid is never signalled."""

import os
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# psutil derives the start time from the boot time, which a clock step can move by less than this.
SAME_START_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """`created` is the start time in epoch seconds, as psutil reads it."""

    pid: int
    created: float


def identify(pid: int) -> ProcessId:
    """Raises psutil.NoSuchProcess when it is already gone."""
    return ProcessId(pid, psutil.Process(pid).create_time())


def find(process: ProcessId) -> psutil.Process | None:
    """The living process, or None: gone, a zombie, or another one under the same pid."""
    try:
        found = psutil.Process(process.pid)
        return found if abs(found.create_time() - process.created) < SAME_START_S and _runs(found) else None
    except psutil.Error:
        return None


def alive(process: ProcessId) -> bool:
    return find(process) is not None


def start_detached(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> ProcessId:
    """Start in a session of its own, output appended to `log`, so that it outlives us and our terminal."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    child.returncode = 0  # it is meant to outlive us: Popen shall neither wait for it nor warn
    return identify(child.pid)


def family(processes: Iterable[ProcessId]) -> list[psutil.Process]:
    """The living ones among `processes`, then all their descendants."""
    roots = [found for p in processes if (found := find(p))]
    members = {p.pid: p for p in roots}
    for root in roots:
        with suppress(psutil.Error):
            members.update((child.pid, child) for child in root.children(recursive=True))
    return list(members.values())


def stop(processes: Iterable[ProcessId], grace_s: float = 10.0) -> int:
    """SIGTERM, wait, then SIGKILL for them and all their descendants. Returns how many had to be killed."""
    roots = [found for p in processes if (found := find(p))]
    everyone = family([ProcessId(r.pid, r.create_time()) for r in roots])
    for process in roots:
        with suppress(psutil.Error):
            process.terminate()
    left = _wait(everyone, grace_s)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    _wait(left, grace_s)
    return len(left)


def _wait(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run after `timeout_s`. A zombie has ended; who collects it is not our concern."""
    deadline = time.monotonic() + timeout_s
    while (processes := [p for p in processes if _runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return processes


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def reap() -> None:
    """Collect ended children of ours, so that a long-lived caller keeps no zombies."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def free_port() -> int:
    """A TCP port nobody listens on now. Somebody may take it before you do: be ready to try again."""
    with closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
