"""The process tree of an attempt, also those that left it by setsid and a second fork. Standard library only on Linux.

A process belongs if it descends from the supervisor (which adopts orphans: child subreaper) or if the environment it
was started with names the folder that the attempt's ranks write. On other systems psutil answers the same questions.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

MARK = "POLYFLEET_ATTEMPT_DIR"
LINUX = sys.platform == "linux"
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Whatever a descendant leaves behind becomes our child instead of init's."""
    if LINUX:
        _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """For a new child before exec: the kernel kills it when `parent` ends, however it ends."""
    if LINUX:
        _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def created_s(pid: int) -> float:
    """Start time in epoch seconds, as psutil's create_time."""
    if not LINUX:
        import psutil

        return float(psutil.Process(pid).create_time())
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def tree(root: int, folder: Path) -> set[int]:
    """Living processes of the attempt whose ranks write `folder`, without `root` itself; by environment alone if 0."""
    parents = _parents()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    todo = [pid for pid in parents if pid == root or _is_marked(pid, folder)]
    found: set[int] = set()
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, ())
    return found - {root, os.getpid()}


def kill_tree(root: int, folder: Path, timeout_s: float = 10.0) -> set[int]:
    """SIGKILL until nobody is left: those who fork meanwhile are found in the next round. Returns who still lives."""
    deadline = time.monotonic() + timeout_s
    while (members := tree(root, folder)) and time.monotonic() < deadline:
        for pid in members:
            send(pid, signal.SIGKILL)
        time.sleep(0.002)
    return members


def send(pid: int, number: int, *, group: bool = False) -> None:
    """A signal to one process or its group; one already gone is as good as signalled."""
    try:
        (os.killpg if group else os.kill)(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _parents() -> dict[int, int]:
    """Parent by pid, without zombies."""
    if not LINUX:
        return _parents_by_psutil()
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (stat := _read(Path(entry.path, "stat"))):
            state, parent = stat.rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                found[int(entry.name)] = int(parent)
    return found


def _parents_by_psutil() -> dict[int, int]:
    import psutil

    listed = psutil.process_iter(["ppid", "status"])
    return {p.pid: p.info["ppid"] or 0 for p in listed if p.info["status"] != psutil.STATUS_ZOMBIE}


def _is_marked(pid: int, folder: Path) -> bool:
    if LINUX:
        return f"\0{MARK}={folder}\0".encode() in b"\0" + _read(Path(f"/proc/{pid}/environ"))
    import psutil

    try:
        return bool(psutil.Process(pid).environ().get(MARK) == str(folder))
    except psutil.Error:
        return False


def _read(path: Path) -> bytes:
    """b"" for a process that is gone, or another user's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
