"""Find and kill the processes of an attempt, even if they left its tree by setsid and a second fork.

A process belongs to the attempt if it descends from the supervisor or its reaper (which adopt orphans as child
subreapers), if it is in the reaper's session, or if it was started with the attempt's folder in its environment. Linux:
standard library only; other systems: psutil.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

MARK = "POLYFLEET_ATTEMPT_DIR"
LINUX = sys.platform == "linux"
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of linux/sched.h, a bit in a process's flags."""
READ_BYTES = 32 << 10
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


class Process(NamedTuple):
    """Unique identity of a process, even if its pid is reused or the clock is set.

    `ticks`: its start, counted from the boot of the machine; `boot`: the id of that boot.
    """

    pid: int
    ticks: int
    boot: str


class ProcessStatus(NamedTuple):
    """State of a running process.

    `is_stopped`: by a signal or debugger. `kernels`: a kernel thread, without environment.
    """

    parent: int
    session: int
    ticks: int
    is_stopped: bool
    is_kernel_thread: bool = False


def adopt_orphans() -> None:
    """Become a child subreaper: orphaned descendants become children of this process instead of init."""
    if LINUX:
        _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_oom_score(first: bool) -> None:
    """Set this process's OOM score: ranks are killed `first`, others as late as any program.

    Ray sets the score of its workers, and so of agents and their children, such that these are killed first.
    """
    if LINUX:
        with suppress(OSError):  # lowering the score may not be permitted
            Path("/proc/self/oom_score_adj").write_text("1000" if first else "0")


def reset_priority() -> None:
    """Set this process's niceness to 0, if that is permitted.

    Ray runs its workers at 15, with a 28th of the CPU time of other busy processes: an agent would reply too late.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends, however it ends. For a new child, before exec."""
    if LINUX:
        _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


@cache
def boot() -> str:
    """The id of the current boot of the machine; "" if the system has none."""
    return _read("/proc/sys/kernel/random/boot_id").decode().strip()


def identify(pid: int) -> Process | None:
    """Return the identity of the process that has this pid now; None if there is none."""
    return Process(pid, status.ticks, boot()) if (status := read_status(pid)) else None


def status_of(process: Process) -> ProcessStatus | None:
    """Return the state of a process; None if it has ended, even if another process has its pid by now."""
    status = read_status(process.pid) if process.boot == boot() else None
    return status if status and status.ticks == process.ticks else None


def read_status(pid: int) -> ProcessStatus | None:
    """Return the state of the process with this pid; None if it has ended or is a zombie."""
    if not LINUX:
        return _status_by_psutil(pid)
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split(maxsplit=20)
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    kernels = bool(int(fields[6]) & _KERNEL_THREAD)
    return ProcessStatus(int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in (b"T", b"t"), kernels)


def _status_by_psutil(pid: int) -> ProcessStatus | None:
    import psutil

    try:
        process = psutil.Process(pid)
        status = process.status()
        if status == psutil.STATUS_ZOMBIE:
            return None
        return ProcessStatus(
            process.ppid() or 0, os.getsid(pid), int(process.create_time() * 100), status == psutil.STATUS_STOPPED
        )
    except (psutil.Error, OSError):
        return None


def attempt_processes(roots: Collection[int], folder: Path, session: Process | None = None) -> set[int]:
    """Running processes of the attempt whose ranks write to `folder`, without `roots` and this process.

    Without roots and `session`, only by their environment. `session` is the session's leader, which may have ended.
    """
    processes = _running()
    if session is not None and not _may_have_processes(session, processes):
        session = None
    mark = f"\0{MARK}={folder}\0".encode()
    user_pids = (pid for pid, status in processes.items() if not status.is_kernel_thread)
    marked_pids = {pid for pid in user_pids if _is_marked(pid, mark)}
    members = [
        pid
        for pid, status in processes.items()
        if pid in roots or pid in marked_pids or _is_in_session(session, status)
    ]
    return _with_descendants(members, processes) - {*roots, os.getpid()}


def descendants(root: int) -> set[int]:
    """Running descendants of `root`, without itself."""
    return _with_descendants([root], _running()) - {root}


def session_processes(leader: int, root: int) -> set[int]:
    """Running descendants of `root` in the session of `leader`, and all descendants of these."""
    processes = _running()
    ours = _with_descendants([root], processes) & processes.keys()
    return _with_descendants([pid for pid in ours if pid == leader or processes[pid].session == leader], processes) - {
        root
    }


def _with_descendants(pending: list[int], processes: dict[int, ProcessStatus]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    members: set[int] = set()
    while pending:
        pid = pending.pop()
        if pid not in members:
            members.add(pid)
            pending += children.get(pid, ())
    return members


def cpu_s(pid: int) -> float:
    """CPU time of a process and of the children it has waited for; 0.0 if it has ended."""
    if LINUX:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split(maxsplit=15)
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if len(fields) > 14 else 0.0
    import psutil

    try:
        return float(sum(psutil.Process(pid).cpu_times()[:4]))
    except psutil.Error:
        return 0.0


def _may_have_processes(session: Process, processes: dict[int, ProcessStatus]) -> bool:
    """Return whether the session may still have processes.

    The kernel does not reuse a pid while a session has that number, so another process with it proves ours empty.
    """
    leader = processes.get(session.pid)
    return session.boot == boot() and (leader is None or leader.ticks == session.ticks)


def _is_in_session(session: Process | None, process: ProcessStatus) -> bool:
    return session is not None and process.session == session.pid and process.ticks >= session.ticks


def kill_tree(members: Callable[[], set[int]], timeout_s: float = 10.0) -> set[int]:
    """Send SIGKILL until no process is left: the next round finds those forked during one.

    Returns the survivors.
    """
    deadline = time.monotonic() + timeout_s
    while (remaining := members()) and time.monotonic() < deadline:
        for pid in remaining:
            send(pid, signal.SIGKILL)
        time.sleep(0.002)
    return remaining


def send(pid: int, number: int, *, group: bool = False) -> None:
    """Send a signal to one process or its group. Does nothing if it has ended."""
    try:
        (os.killpg if group else os.kill)(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _running() -> dict[int, ProcessStatus]:
    """Running processes by pid."""
    if LINUX:
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    else:
        import psutil

        pids = psutil.pids()
    return {pid: status for pid in pids if (status := read_status(pid))}


def _is_marked(pid: int, mark: bytes) -> bool:
    if LINUX:
        return mark in b"\0" + _read(f"/proc/{pid}/environ")
    import psutil

    try:
        return bool(f"\0{MARK}={psutil.Process(pid).environ().get(MARK)}\0".encode() == mark)
    except psutil.Error:
        return False


def _read(path: str) -> bytes:
    """Read a file of /proc; b"" if the process has ended or is another user's.

    It runs for every process of the machine: a file object would make three times as many system calls.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    data = b""
    try:
        while piece := os.read(descriptor, READ_BYTES):
            data += piece
            if len(piece) < READ_BYTES and path.endswith("/stat"):  # one line
                break
    except OSError:
        return b""
    finally:
        os.close(descriptor)
    return data
