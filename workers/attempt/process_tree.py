"""The process tree of an attempt, also those that left it by setsid and a second fork. Standard library only on Linux.

A process belongs if it descends from the supervisor or its keeper (which adopt orphans: child subreapers), if it is of
the keeper's session, or if the environment it was started with names the attempt's folder. On other systems psutil
answers the same questions.
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
"""PF_KTHREAD of linux/sched.h, among a process's flags."""
READ_BYTES = 32 << 10
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


class Process(NamedTuple):
    """One process and no other, however often its number is used again and the clock is set: `ticks` count from the
    start of the machine, which `boot` names.
    """

    pid: int
    ticks: int
    boot: str


class Stat(NamedTuple):
    """Of a living process; `stopped` by a signal or a debugger; `kernels`: a thread of its own, without environment."""

    parent: int
    session: int
    ticks: int
    stopped: bool
    kernels: bool = False


def adopt_orphans() -> None:
    """Whatever a descendant leaves behind becomes our child instead of init's."""
    if LINUX:
        _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def killed_for_memory(first: bool) -> None:
    """Whom the kernel kills when memory runs out: a rank first, an agent or a supervisor as late as any other program.

    Ray lets all its workers, of which an agent is one, and so what they start, go first.
    """
    if LINUX:
        with suppress(OSError):  # without the right to go back
            Path("/proc/self/oom_score_adj").write_text("1000" if first else "0")


def die_with(parent: int) -> None:
    """For a new child before exec: the kernel kills it when `parent` ends, however it ends."""
    if LINUX:
        _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


@cache
def boot() -> str:
    """A name of this run of the machine; "" where the system has none."""
    return _read("/proc/sys/kernel/random/boot_id").decode().strip()


def identify(pid: int) -> Process | None:
    """None for one that is gone."""
    return Process(pid, found.ticks, boot()) if (found := stat(pid)) else None


def stat_of(process: Process) -> Stat | None:
    """None when it has ended, also when another has its number by now."""
    found = stat(process.pid) if process.boot == boot() else None
    return found if found and found.ticks == process.ticks else None


def stat(pid: int) -> Stat | None:
    """None for a zombie, and for one that is gone."""
    if not LINUX:
        return _stat_by_psutil(pid)
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split(maxsplit=20)
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    kernels = bool(int(fields[6]) & _KERNEL_THREAD)
    return Stat(int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in (b"T", b"t"), kernels)


def _stat_by_psutil(pid: int) -> Stat | None:
    import psutil

    try:
        it = psutil.Process(pid)
        state = it.status()
        if state == psutil.STATUS_ZOMBIE:
            return None
        return Stat(it.ppid() or 0, os.getsid(pid), int(it.create_time() * 100), state == psutil.STATUS_STOPPED)
    except (psutil.Error, OSError):
        return None


def tree(roots: Collection[int], folder: Path, session: Process | None = None) -> set[int]:
    """Living processes of the attempt whose ranks were told of `folder`, without `roots` and ourselves. No roots and no
    `session`: by their environment alone. `session` is its leader, who may have ended.
    """
    seen = _living()
    if session is not None and not _may_be(session, seen):
        session = None
    mark = f"\0{MARK}={folder}\0".encode()
    of_users = (pid for pid, it in seen.items() if not it.kernels)
    marked = {pid for pid in of_users if _is_marked(pid, mark)}
    first = [pid for pid, it in seen.items() if pid in roots or pid in marked or _is_of(session, it)]
    return _with_descendants(first, seen) - {*roots, os.getpid()}


def descendants(root: int) -> set[int]:
    """Living ones, without `root`."""
    return _with_descendants([root], _living()) - {root}


def of_session(leader: int, root: int) -> set[int]:
    """Living descendants of `root` that are of the session which `leader` began, and what descends from those."""
    seen = _living()
    ours = _with_descendants([root], seen) & seen.keys()
    return _with_descendants([pid for pid in ours if pid == leader or seen[pid].session == leader], seen) - {root}


def _with_descendants(todo: list[int], seen: dict[int, Stat]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in seen.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, ())
    return found


def cpu_s(pid: int) -> float:
    """CPU time of a process and of those it has waited for; 0.0 for one that is gone."""
    if LINUX:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split(maxsplit=15)
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if len(fields) > 14 else 0.0
    import psutil

    try:
        return float(sum(psutil.Process(pid).cpu_times()[:4]))
    except psutil.Error:
        return 0.0


def _may_be(session: Process, seen: dict[int, Stat]) -> bool:
    """The kernel gives no number to a process while a session is called so: another who has it proves ours empty."""
    leader = seen.get(session.pid)
    return session.boot == boot() and (leader is None or leader.ticks == session.ticks)


def _is_of(session: Process | None, process: Stat) -> bool:
    return session is not None and process.session == session.pid and process.ticks >= session.ticks


def kill_tree(members: Callable[[], set[int]], timeout_s: float = 10.0) -> set[int]:
    """SIGKILL until nobody is left: those who fork meanwhile are found in the next round. Returns who still lives."""
    deadline = time.monotonic() + timeout_s
    while (found := members()) and time.monotonic() < deadline:
        for pid in found:
            send(pid, signal.SIGKILL)
        time.sleep(0.002)
    return found


def send(pid: int, number: int, *, group: bool = False) -> None:
    """A signal to one process or its group; one already gone is as good as signalled."""
    try:
        (os.killpg if group else os.kill)(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _living() -> dict[int, Stat]:
    """By pid."""
    if LINUX:
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    else:
        import psutil

        pids = psutil.pids()
    return {pid: found for pid in pids if (found := stat(pid))}


def _is_marked(pid: int, mark: bytes) -> bool:
    if LINUX:
        return mark in b"\0" + _read(f"/proc/{pid}/environ")
    import psutil

    try:
        return bool(f"\0{MARK}={psutil.Process(pid).environ().get(MARK)}\0".encode() == mark)
    except psutil.Error:
        return False


def _read(path: str) -> bytes:
    """b"" for a process that is gone, or another user's. It is called for every process there is: a file object would
    ask the system three times as often.
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
