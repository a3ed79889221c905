"""Memory that ran out: whom the kernel killed for it, and what the limit was. Standard library only.

A killed rank leaves SIGKILL and no word. The kernel counts its kills: of a control group (`memory.events` in version 2,
`memory.oom_control` in version 1), and of the whole machine (`oom_kill` in /proc/vmstat, since Linux 4.13). Its log
names each process it killed. Source: Documentation/admin-guide/cgroup-v2.rst, mm/oom_kill.c.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from workers.attempt.cgroup import ControlGroup
from workers.attempt.process_tree import LINUX

SAMPLE_EVERY_S = 5.0
LOG_WAIT_S = 0.2
"""For the log's line: the kernel writes it just after it has sent SIGKILL."""
NO_LIMIT_BYTES = 1 << 60
"""An unlimited group of version 1 shows nearly 2^63."""
KILLED = re.compile(rb"Killed process (\d+) ")
FIRST_NAMESPACE = "pid:[4026531836]"
"""Process numbers of the log are those of the first namespace. Source: PROC_PID_INIT_INO in linux/proc_ns.h."""


class OomCounts(NamedTuple):
    """Kills so far: in the attempt's own control group, in those this process is a member of, and on the machine."""

    own: int
    groups: int
    machine: int


class OomMonitor:
    """What happened to the memory of one attempt, as its supervisor sees it. `group` is the attempt's own, if any."""

    def __init__(self, group: ControlGroup | None):
        self._group = group
        self._groups = list(_own_groups())
        self._before = self._last = self._counts()
        self._sampled_s = time.monotonic()
        self._log = _KernelLog()

    def look(self) -> None:
        """Called often: kills of long ago do not count for a rank that is killed now."""
        if time.monotonic() - self._sampled_s >= SAMPLE_EVERY_S:
            self._before, self._last = self._last, self._counts()
            self._sampled_s = time.monotonic()

    def _counts(self) -> OomCounts:
        kills = re.search(r"^oom_kill (\d+)$", _text(Path("/proc/vmstat")), re.MULTILINE)
        own = self._group.killed_for_memory() if self._group is not None else 0
        return OomCounts(own, sum(map(_kills, self._groups)), int(kills[1]) if kills else 0)

    def killed_in_attempt(self) -> bool:
        """The kernel has lately killed one of the attempt's processes, whichever: its own control group counts them."""
        return self._group is not None and self._group.killed_for_memory() > self._before.own

    def killed(self, pid: int) -> bool:
        """Whether the kernel killed this process, which has ended by SIGKILL, lately. `pid` 0: not known whom."""
        if self.killed_in_attempt():
            return True
        now = self._counts()
        if now == self._before:
            return False
        named = self._log.killed(pid) if pid else None
        return named if named is not None else True

    def limit(self) -> str:
        """The tightest, in words."""
        if self._group is not None and (own := self._group.memory_limit_bytes()):
            return f"the attempt's limit is {size(own)}"
        found = [limit for folder in self._groups for limit in _limits(folder)]
        total = re.search(r"^MemTotal:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
        machine = int(total[1]) << 10 if total else 0
        if found and (not machine or min(found) < machine):
            return f"the limit of its control group is {size(min(found))}"
        return f"the node has {size(machine)}" if machine else ""


class _KernelLog:
    """Processes named in the kernel's log since this was made, where it may be read."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._killed: set[int] = set()
        with suppress(OSError):
            if LINUX and str(Path("/proc/self/ns/pid").readlink()) == FIRST_NAMESPACE:
                self._descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._descriptor, 0, os.SEEK_END)

    def killed(self, pid: int) -> bool | None:
        """None: it cannot be read, or was lost in part."""
        until = time.monotonic() + LOG_WAIT_S
        while self._descriptor is not None:
            self._read()
            if pid in self._killed or time.monotonic() >= until:
                return pid in self._killed
            time.sleep(0.01)
        return None

    def _read(self) -> None:
        while self._descriptor is not None:
            try:
                record = os.read(self._descriptor, 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:  # so much was logged that older lines are gone
                continue
            except OSError:
                self._descriptor = None
                return
            self._killed |= {int(pid) for pid in KILLED.findall(record)}


def _own_groups() -> Iterator[Path]:
    """Folders of this process's groups that account for memory, of either version. Source: proc_pid_mountinfo(5)."""
    paths = {}
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        words, _, after = line.partition(" - ")
        kind, *_, options = after.split(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            shown, where = words.split(" ")[3:5]
            inside = os.path.relpath(paths.pop(kind, "/.."), shown)
            if not inside.startswith(".."):
                yield Path(where.replace("\\040", " ")) / inside


def _kills(folder: Path) -> int:
    for file in ("memory.events", "memory.oom_control"):
        if found := re.search(r"^oom_kill (\d+)$", _text(folder / file), re.MULTILINE):
            return int(found[1])
    return 0


def _limits(folder: Path) -> Iterator[int]:
    """Of a group and of those above it."""
    for above in (folder, *folder.parents):
        for file in ("memory.max", "memory.limit_in_bytes"):
            text = _text(above / file).strip()
            if text.isdigit() and int(text) < NO_LIMIT_BYTES:
                yield int(text)


def size(number: int) -> str:
    """`3.9 GiB`, `96 MiB`."""
    return f"{number / 2**30:.1f} GiB" if number >= 1 << 30 else f"{number / 2**20:.0f} MiB"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
