"""Control group (cgroup v2) of an attempt's ranks: to kill, limit and measure them together.

Where this process may not create one, attempts run without. Standard library only: supervisors import this.
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
"""Variable with the group to create ours in; "off": create none. Default: the group that the node itself is in."""
PIDS = "POLYFLEET_ATTEMPT_PIDS"
MEMORY = "POLYFLEET_ATTEMPT_MEMORY_BYTES"
CONTROLLERS = ("memory", "pids")
DELEGATE_REMEDY = (
    "give the node's service `Delegate=yes` (systemd), or its container a control group namespace it may write to"
)


class Hierarchy(NamedTuple):
    """The group in which others can be created, or the reason why there is none."""

    root: Path | None
    unavailable_reason: str = ""


def find(environ: Mapping[str, str] = os.environ, top: Path = Path("/")) -> Hierarchy:
    """Find the group to create ours in: the variable's, else that of this process. Changes nothing."""
    if environ.get(ROOT) == "off":
        return Hierarchy(None, f"{ROOT} is off")
    root = Path(environ[ROOT]) if environ.get(ROOT) else _own_group(top)
    if root is None:
        return Hierarchy(None, "no control groups of version 2 are mounted here")
    if not (os.access(root, os.W_OK) and os.access(root / "cgroup.procs", os.W_OK)):
        return Hierarchy(None, f"{root} is not writable")
    return Hierarchy(root)


def _own_group(top: Path) -> Path | None:
    """The group of this process, without subgroups of Ray; the one above if systemd delegated it to us."""
    lines = _text(top / "proc/self/cgroup").splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    mounted = _mounted_group(_text(top / "proc/self/mountinfo"))
    if own is None or mounted is None:
        return None
    mount_point, mounted_group = mounted
    if mounted_group != "/":
        own = "/" + os.path.relpath(own, mounted_group)
    parts = [part for part in own.split("/") if part]
    if ".." in parts:  # the group is not visible in this container
        return None
    ray_index = next((i for i, part in enumerate(parts) if part.startswith("ray-node")), len(parts))
    mount = top / mount_point.lstrip("/")
    group = mount.joinpath(*parts[:ray_index])
    return group.parent if group != mount and _is_delegated(group.parent) else group


def _mounted_group(mountinfo: str) -> tuple[str, str] | None:
    """Return (mount point, group that is mounted there). Source: proc_pid_mountinfo(5)."""
    for line in mountinfo.splitlines():
        mount_fields, _, filesystem = line.partition(" - ")
        if filesystem.split(" ", 1)[0] == "cgroup2":
            group, mount_point = mount_fields.split(" ")[3:5]
            return mount_point.replace("\\040", " "), group
    return None


def _is_delegated(group: Path) -> bool:
    """Return whether systemd delegated the group with DelegateSubgroup=, so that it has no processes.

    A user's entire session has the same mark, but the user's systemd manages that. Source: systemd's
    CGROUP_DELEGATION.md.
    """
    if not hasattr(os, "getxattr") or (group / "init.scope").exists():
        return False
    with suppress(OSError):
        return os.getxattr(group, "user.delegate") == b"1" and not _text(group / "cgroup.procs")
    return False


def name(folder: Path) -> str:
    """Name of the group of the attempt in `folder`; other nodes of this machine have other folders."""
    return f"polyfleet-{folder.name}-{zlib.crc32(str(folder).encode()):08x}"


def limits(root: Path, environ: Mapping[str, str] = os.environ, top: Path = Path("/")) -> dict[str, str]:
    """Limits of an attempt's group: value by file name.

    By default half of the processes and threads that the machine, or the group above, allows, so that a fork bomb
    leaves the other half to others. Memory is limited only if the node's variable is set.
    """
    files = (top / "proc/sys/kernel/pid_max", top / "proc/sys/kernel/threads-max", root / "pids.max")
    maxima = [int(text) for file in files if (text := _text(file)).isdigit()]
    requested = {"pids.max": environ.get(PIDS, ""), "memory.max": environ.get(MEMORY, "")}
    default = {"pids.max": str(min(maxima) // 2)} if maxima else {}
    return default | {file: value for file, value in requested.items() if value.isdigit()}


class ControlGroup:
    """The control group of one attempt. Every method may be called whether or not the group exists."""

    def __init__(self, path: Path):
        self.path = path

    def create(self, limits: Mapping[str, str]) -> bool:
        """Create it.

        Returns False if the kernel refuses. Limits whose controller is not available are skipped.
        """
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

    def open_folder(self) -> int | None:
        """Open a descriptor of its folder, to start processes in it. None if there is no group."""
        with suppress(OSError):
            return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return None

    def kill(self) -> None:
        """Send SIGKILL to all processes in it and in groups below, also to any that they fork in that moment."""
        _write(self.path / "cgroup.kill", "1")

    def members(self) -> set[int]:
        texts = (_text(folder / "cgroup.procs") for folder in (self.path, *self._subgroups()))
        return {int(pid) for text in texts for pid in text.split()} - {0}  # 0: a process outside our pid namespace

    def remove(self, timeout_s: float) -> bool:
        """Kill its processes and remove it with all groups below.

        Returns False if a process has not died in time.
        """
        deadline = time.monotonic() + timeout_s
        while self.path.is_dir():
            self.kill()
            for folder in (*reversed(self._subgroups()), self.path):
                with suppress(OSError):
                    folder.rmdir()
            if time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        return not self.path.is_dir()

    def _subgroups(self) -> list[Path]:
        """Groups that the ranks created below it, outer ones first."""
        return [Path(folder) for folder, _, _ in os.walk(self.path)][1:]

    def peak_bytes(self) -> int:
        """Peak memory of all its processes together, file cache included; 0 if it is not measured."""
        text = _text(self.path / "memory.peak")
        return int(text) if text.isdigit() else 0

    def memory_limit_bytes(self) -> int:
        """Its memory limit; 0 for none."""
        text = _text(self.path / "memory.max")
        return int(text) if text.isdigit() else 0

    def killed_for_memory(self) -> int:
        """Number of its processes that the kernel killed because memory ran out."""
        counts = dict(line.split(" ", 1) for line in _text(self.path / "memory.events").splitlines())
        return int(counts.get("oom_kill", 0))


def _text(path: Path) -> str:
    """Text of a file; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _write(path: Path, text: str) -> None:
    """Write a control file, if it exists; it is never created."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
