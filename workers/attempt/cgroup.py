"""A control group (version 2) for the ranks of an attempt: killed as one, limited as one, measured as one.

Where there is none that we may write, attempts run without. Standard library only: supervisors import this.
Source: the kernel's Documentation/admin-guide/cgroup-v2.rst; `cgroup.kill` is there since Linux 5.14.
"""

import os
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = "POLYFLEET_CGROUP_ROOT"
"""Names the group to make ours in; "off": make none. Without it they are made in the node's own group."""
PIDS = "POLYFLEET_ATTEMPT_PIDS"
MEMORY = "POLYFLEET_ATTEMPT_MEMORY_BYTES"
CONTROLLERS = ("memory", "pids")
SERVICE = "give the node's service `Delegate=yes` (systemd), or its container a control group namespace it may write to"


class Hierarchy(NamedTuple):
    """Where groups can be made, or `why_not`."""

    root: Path | None
    why_not: str = ""


def find(environ: Mapping[str, str] = os.environ, top: Path = Path("/")) -> Hierarchy:
    """By the variable, else the group this process is in. Nothing is made or changed."""
    if environ.get(ROOT) == "off":
        return Hierarchy(None, f"{ROOT} is off")
    root = Path(environ[ROOT]) if environ.get(ROOT) else _own(top)
    if root is None:
        return Hierarchy(None, "no control groups of version 2 are mounted here")
    if not (os.access(root, os.W_OK) and os.access(root / "cgroup.procs", os.W_OK)):
        return Hierarchy(None, f"{root} may not be written")
    return Hierarchy(root)


def _own(top: Path) -> Path | None:
    """The group of this process, without those that Ray makes; the one above, if systemd has handed that to us."""
    lines = _text(top / "proc/self/cgroup").splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    mounted = _mounted(_text(top / "proc/self/mountinfo"))
    if own is None or mounted is None:
        return None
    where, shown = mounted
    if shown != "/":
        own = "/" + os.path.relpath(own, shown)
    parts = [part for part in own.split("/") if part]
    if ".." in parts:  # outside of what this container sees
        return None
    rays = next((i for i, part in enumerate(parts) if part.startswith("ray-node")), len(parts))
    mount = top / where.lstrip("/")
    group = mount.joinpath(*parts[:rays])
    return group.parent if group != mount and _is_ours(group.parent) else group


def _mounted(mountinfo: str) -> tuple[str, str] | None:
    """(mount point, which group is seen there). Source: proc_pid_mountinfo(5)."""
    for line in mountinfo.splitlines():
        words, _, after = line.partition(" - ")
        if after.split(" ", 1)[0] == "cgroup2":
            shown, where = words.split(" ")[3:5]
            return where.replace("\\040", " "), shown
    return None


def _is_ours(group: Path) -> bool:
    """Handed to its service with DelegateSubgroup=, so that nobody runs in it. Source: systemd's CGROUP_DELEGATION.md.
    A user's whole session is marked in the same way, but belongs to its systemd.
    """
    if not hasattr(os, "getxattr") or (group / "init.scope").exists():
        return False
    with suppress(OSError):
        return os.getxattr(group, "user.delegate") == b"1" and not _text(group / "cgroup.procs")
    return False


def name(folder: Path) -> str:
    """Of the group for the attempt whose record is `folder`; other nodes of this machine have other folders."""
    return f"polyfleet-{folder.name}-{zlib.crc32(str(folder).encode()):08x}"


def limits(root: Path, environ: Mapping[str, str] = os.environ, top: Path = Path("/")) -> dict[str, str]:
    """Value by file. A bomb of processes and threads leaves half of what the machine, or the group above, can hold to
    others; memory is limited only where the node's variable says so.
    """
    files = (top / "proc/sys/kernel/pid_max", top / "proc/sys/kernel/threads-max", root / "pids.max")
    most = [int(text) for file in files if (text := _text(file)).isdigit()]
    asked = {"pids.max": environ.get(PIDS, ""), "memory.max": environ.get(MEMORY, "")}
    usual = {"pids.max": str(min(most) // 2)} if most else {}
    return usual | {file: value for file, value in asked.items() if value.isdigit()}


class ControlGroup:
    """One attempt's. Every method can be called whether it exists or not."""

    def __init__(self, path: Path):
        self.path = path

    def make(self, limits: Mapping[str, str]) -> bool:
        """False where the kernel refuses; limits whose controller is not to be had are left out."""
        for controller in CONTROLLERS:
            _write(self.path.parent / "cgroup.subtree_control", f"+{controller}")
        with suppress(OSError):
            self.path.mkdir(exist_ok=True)
        if not (self.path / "cgroup.kill").exists():
            self.remove(0.0)
            return False
        for file, value in limits.items():
            _write(self.path / file, value)
        return True

    def opened(self) -> int | None:
        """A descriptor of its folder, to start processes in it."""
        with suppress(OSError):
            return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return None

    def kill(self) -> None:
        """SIGKILL to all that are in it or in a group below, also to those who fork meanwhile."""
        _write(self.path / "cgroup.kill", "1")

    def members(self) -> set[int]:
        found = (_text(folder / "cgroup.procs") for folder in (self.path, *self._below()))
        return {int(pid) for text in found for pid in text.split()} - {0}  # 0: somebody outside our pid namespace

    def remove(self, timeout_s: float) -> bool:
        """Kill, and remove it with what is below. False while somebody cannot die yet."""
        deadline = time.monotonic() + timeout_s
        while self.path.is_dir():
            self.kill()
            for folder in (*reversed(self._below()), self.path):
                with suppress(OSError):
                    folder.rmdir()
            if time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        return not self.path.is_dir()

    def _below(self) -> list[Path]:
        """Groups that the ranks made, outer ones first."""
        return [Path(folder) for folder, _, _ in os.walk(self.path)][1:]

    def peak_bytes(self) -> int:
        """The most memory its processes held at one time, file cache included; 0 where it is not measured."""
        text = _text(self.path / "memory.peak")
        return int(text) if text.isdigit() else 0

    def memory_limit_bytes(self) -> int:
        """0: none."""
        text = _text(self.path / "memory.max")
        return int(text) if text.isdigit() else 0

    def killed_for_memory(self) -> int:
        """How many of its processes the kernel has killed because memory ran out."""
        counts = dict(line.split(" ", 1) for line in _text(self.path / "memory.events").splitlines())
        return int(counts.get("oom_kill", 0))


def _text(path: Path) -> str:
    """ "" for a file that is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _write(path: Path, text: str) -> None:
    """Control files are never made: whoever writes where there is none writes nothing."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
