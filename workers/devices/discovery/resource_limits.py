"""CPUs and memory that this process may use, by affinity and control groups (versions 1 and 2)."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import psutil

from workers.devices.discovery.machine import Machine

# An unlimited group of version 1 has a limit of nearly 2^63 bytes, more than any machine has.
NO_LIMIT_BYTES = 1 << 60


def cores(machine: Machine) -> int:
    """Number of CPUs by affinity, at most the CPU quota (rounded up), at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (psutil.cpu_count() or 1)
    quotas = [q for folder in _groups(machine, "cpu") if (q := _cpu_quota(machine, folder)) is not None]
    return max(1, min([allowed, *(math.ceil(q) for q in quotas)]))


def memory(machine: Machine) -> tuple[int, int]:
    """Return (total, free) bytes: the minimum over the machine and all control groups above this process."""
    host = psutil.virtual_memory()
    on_gpus = _on_gpus(machine)
    total, free = host.total - on_gpus[0], max(0, host.available - on_gpus[1])
    for folder in _groups(machine, "memory"):
        limit, used = _memory_limit(machine, folder)
        if limit is not None and limit < total:
            total = limit
        if limit is not None:
            free = min(free, max(limit - used, 0))
    return total, free


def _on_gpus(machine: Machine) -> tuple[int, int]:
    """Return (total, free) bytes of GPU memory that the kernel counts as the machine's.

    On Grace Hopper and Grace Blackwell the memory of a GPU is also a NUMA node. Source: numa_status in the README of
    NVIDIA's driver.
    """
    total = free = 0
    for status in machine.glob("proc/driver/nvidia/gpus/*/numa_status"):
        node = re.search(r"^Node:\s*(\d+)", machine.text(status), re.MULTILINE)
        meminfo = machine.text(f"sys/devices/system/node/node{node[1]}/meminfo") if node else ""
        sizes = dict(re.findall(r"(MemTotal|MemFree):\s*(\d+) kB", meminfo))
        total, free = total + (int(sizes.get("MemTotal", 0)) << 10), free + (int(sizes.get("MemFree", 0)) << 10)
    return total, free


def _groups(machine: Machine, controller: str) -> Iterator[str]:
    """Yield the mounted folders of this process's groups and of all groups above them; some may not exist."""
    for line in machine.text("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = "sys/fs/cgroup" if not controllers else f"sys/fs/cgroup/{controller}"
        relative_path = PurePosixPath(path.lstrip("/"))
        yield from (str(PurePosixPath(mount) / part) for part in (relative_path, *relative_path.parents))


def _cpu_quota(machine: Machine, folder: str) -> float | None:
    quota, _, period = machine.text(f"{folder}/cpu.max").partition(" ")
    if not quota:
        quota, period = machine.text(f"{folder}/cpu.cfs_quota_us"), machine.text(f"{folder}/cpu.cfs_period_us")
    if quota in ("", "max", "-1") or not period:
        return None
    return int(quota) / int(period)


def _memory_limit(machine: Machine, folder: str) -> tuple[int | None, int]:
    """Return (limit or None, bytes in use that the kernel could not reclaim at once)."""
    limit = machine.number(f"{folder}/memory.max") or machine.number(f"{folder}/memory.limit_in_bytes")
    if limit is None or limit >= NO_LIMIT_BYTES:
        return None, 0
    used = machine.number(f"{folder}/memory.current") or machine.number(f"{folder}/memory.usage_in_bytes") or 0
    stat = dict(line.split(" ", 1) for line in machine.text(f"{folder}/memory.stat").splitlines() if " " in line)
    return limit, max(used - int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0), 0)
