"""Find out whether the kernel killed a rank because memory ran out, and the limit.

Standard library only.

A killed rank leaves an exit by SIGKILL and no message. The kernel counts its kills per control group (`memory.events`
in version 2, `memory.oom_control` in version 1) and for the machine (`oom_kill` in /proc/vmstat, since Linux 4.13), and
its log names each process it killed. Source: Documentation/admin-guide/cgroup-v2.rst, mm/oom_kill.c.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from workers.processes.cgroup import ControlGroup
from workers.processes.process_tree import LINUX

SAMPLE_EVERY_S = 5.0
LOG_WAIT_S = 0.2
"""Maximum wait for the line in the kernel's log, which is written just after SIGKILL was sent."""
NO_LIMIT_BYTES = 1 << 60
"""Limits from here on mean no limit: an unlimited group of version 1 shows nearly 2^63."""
KILLED = re.compile(rb"Killed process (\d+) ")
FIRST_NAMESPACE = "pid:[4026531836]"
"""The initial pid namespace, whose pids the kernel's log has. Source: PROC_PID_INIT_INO in linux/proc_ns.h."""


class OomCounts(NamedTuple):
    """Kills so far: in the attempt's control group, in the groups of this process, and on the machine."""

    own: int
    groups: int
    machine: int


class OomMonitor:
    """Notices kills for memory in one attempt, for its supervisor.

    `group` is the attempt's control group, if any.
    """

    def __init__(self, group: ControlGroup | None):
        self._group = group
        self._groups = list(_own_groups())
        self._baseline = self._last = self._counts()
        self._sampled_s = time.monotonic()
        self._log = _KernelLog()

    def sample(self) -> None:
        """Sample the counters. Called often, so that earlier kills do not count for a rank that is killed now."""
        if time.monotonic() - self._sampled_s >= SAMPLE_EVERY_S:
            self._baseline, self._last = self._last, self._counts()
            self._sampled_s = time.monotonic()

    def _counts(self) -> OomCounts:
        kills = re.search(r"^oom_kill (\d+)$", _text(Path("/proc/vmstat")), re.MULTILINE)
        own_kills = self._group.killed_for_memory() if self._group is not None else 0
        return OomCounts(own_kills, sum(map(_kills, self._groups)), int(kills[1]) if kills else 0)

    def has_kill_in_attempt(self) -> bool:
        """Return whether the kernel lately killed any process of the attempt, as its control group shows."""
        return self._group is not None and self._group.killed_for_memory() > self._baseline.own

    def was_killed(self, pid: int) -> bool:
        """Return whether the kernel lately killed this process, which ended by SIGKILL.

        `pid` 0: unknown process.
        """
        if self.has_kill_in_attempt():
            return True
        now = self._counts()
        if now == self._baseline:
            return False
        in_log = self._log.killed(pid) if pid else None
        return in_log if in_log is not None else True

    def limit(self) -> str:
        """Describe the tightest memory limit."""
        if self._group is not None and (own_limit := self._group.memory_limit_bytes()):
            return f"the attempt's limit is {format_size(own_limit)}"
        limits = [limit for folder in self._groups for limit in _memory_limits(folder)]
        total = re.search(r"^MemTotal:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
        machine = int(total[1]) << 10 if total else 0
        if limits and (not machine or min(limits) < machine):
            return f"the limit of its control group is {format_size(min(limits))}"
        return f"the node has {format_size(machine)}" if machine else ""


class _KernelLog:
    """Processes that the kernel's log has named since this object was created, if the log can be read."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._killed: set[int] = set()
        with suppress(OSError):
            if LINUX and str(Path("/proc/self/ns/pid").readlink()) == FIRST_NAMESPACE:
                self._descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._descriptor, 0, os.SEEK_END)

    def killed(self, pid: int) -> bool | None:
        """Return whether the log names this process as killed; None if the log cannot be read."""
        deadline_s = time.monotonic() + LOG_WAIT_S
        while self._descriptor is not None:
            self._read()
            if pid in self._killed or time.monotonic() >= deadline_s:
                return pid in self._killed
            time.sleep(0.01)
        return None

    def _read(self) -> None:
        while self._descriptor is not None:
            try:
                record = os.read(self._descriptor, 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:  # older lines were overwritten before they were read
                continue
            except OSError:
                self._descriptor = None
                return
            self._killed |= {int(pid) for pid in KILLED.findall(record)}


def _own_groups() -> Iterator[Path]:
    """Yield folders of this process's control groups that count memory. Source: proc_pid_mountinfo(5)."""
    paths = {}
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        mount_fields, _, filesystem = line.partition(" - ")
        kind, *_, options = filesystem.split(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            mounted_group, mount_point = mount_fields.split(" ")[3:5]
            relative_path = os.path.relpath(paths.pop(kind, "/.."), mounted_group)
            if not relative_path.startswith(".."):
                yield Path(mount_point.replace("\\040", " ")) / relative_path


def _kills(folder: Path) -> int:
    for file in ("memory.events", "memory.oom_control"):
        if match := re.search(r"^oom_kill (\d+)$", _text(folder / file), re.MULTILINE):
            return int(match[1])
    return 0


def _memory_limits(folder: Path) -> Iterator[int]:
    """Yield the memory limits of a group and of those above it."""
    for group_folder in (folder, *folder.parents):
        for file in ("memory.max", "memory.limit_in_bytes"):
            text = _text(group_folder / file).strip()
            if text.isdigit() and int(text) < NO_LIMIT_BYTES:
                yield int(text)


def format_size(number: int) -> str:
    """Format bytes, as `3.9 GiB` or `96 MiB`."""
    return f"{number / 2**30:.1f} GiB" if number >= 1 << 30 else f"{number / 2**20:.0f} MiB"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
