"""Findings for `doctor` about the machine: limits, GPU faults in the kernel's log, old drivers, broken libraries.

Installed vendor libraries are each imported in a child process, because one may hang or crash.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from cluster.types import Device, Finding
from workers.devices.discovery.machine import Machine, tool_output
from workers.devices.discovery.resource_limits import cores, memory
from workers.devices.discovery.versions import TorchBuild, torch_build
from workers.processes import cgroup
from workers.processes.interpreter import MODULES, has, interpreter

KERNEL_LOG_BYTES = 1 << 20
IMPORT_TIMEOUT_S = 120.0
# Meanings of the most common Xids. Source: NVIDIA's "XID Errors" document.
XIDS = {13: "graphics engine exception", 31: "memory page fault", 48: "double-bit ECC error", 63: "row remapping",
        64: "row remapping failed", 74: "NVLink error", 79: "GPU has fallen off the bus", 94: "contained ECC error",
        95: "uncontained ECC error", 119: "GSP timeout"}  # fmt: skip
# Xids caused by applications, not by the card.
HARMLESS_XIDS = frozenset({13, 31, 43, 45})


def health(devices: Sequence[Device], machine: Machine) -> list[Finding]:
    return [*_limits(machine), *_groups(machine), *_xids(machine, devices), *old_drivers(devices, torch_build())]


def _limits(machine: Machine) -> list[Finding]:
    """Report limits below what the machine has. They are not errors, but may surprise a user."""
    findings = []
    cpus, allowed = psutil.cpu_count() or 1, cores(machine)
    if allowed < cpus:
        message = f"{allowed} of {cpus} CPUs may be used here: a control group or the affinity mask limits them"
        findings.append(Finding("info", "limits", message, "raise the container's CPU limit if you need more CPUs"))
    total, _ = memory(machine)
    machine_total = psutil.virtual_memory().total
    if total < machine_total:
        message = (
            f"{total / 2**30:.1f} of {machine_total / 2**30:.1f} GiB of memory may be used: a control group limits it"
        )
        findings.append(
            Finding("info", "limits", message, "raise the container's memory limit if you need more memory")
        )
    return findings


def _groups(machine: Machine) -> list[Finding]:
    """Report missing control groups: without them, a process that evades detection can outlive its attempt."""
    groups = cgroup.find(machine.environ, machine.root)
    if groups.root is not None or not machine.text("proc/self/cgroup"):
        return []
    message = (
        f"attempts here cannot be limited, measured or killed as a control group each: {groups.unavailable_reason}"
    )
    return [Finding("info", "control groups", message, cgroup.DELEGATE_REMEDY)]


def _xids(machine: Machine, devices: Sequence[Device]) -> list[Finding]:
    """Count Xid errors in the kernel's log, if this process may read it."""
    if not any(d.backend == "nvidia" for d in devices):
        return []
    counts = Counter(re.findall(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)", kernel_log(machine)))
    return [
        Finding(
            "error",
            "nvidia",
            f"the driver reported Xid {number} ({XIDS.get(int(number), 'see NVIDIA')}) {times}x for the GPU at {gpu}",
            "reset the GPU or reboot; if it comes back, have the card checked",
        )
        for (gpu, number), times in sorted(counts.items())
        if int(number) not in HARMLESS_XIDS
    ]


def kernel_log(machine: Machine) -> str:
    """Current content of /dev/kmsg; "" if this process may not read it. Never blocks."""
    try:
        log = os.open(machine.path("dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    lines: list[bytes] = []
    try:
        while sum(map(len, lines)) < KERNEL_LOG_BYTES and (line := os.read(log, 8192)):
            lines.append(line)
    except OSError:  # BlockingIOError: end of the log; EPIPE: the kernel overwrote lines during the read
        pass
    finally:
        os.close(log)
    return b"".join(lines).decode(errors="replace")


def old_drivers(devices: Sequence[Device], build: TorchBuild | None) -> list[Finding]:
    """Report a driver older than torch's CUDA: CUDA needs a driver of its own major version or newer.

    Source: NVIDIA's CUDA compatibility, minor versions.
    """
    driver = next((str(d.properties["cuda_driver"]) for d in devices if d.properties.get("cuda_driver")), "")
    if build is None or not build.cuda or not driver or int(build.cuda.split(".")[0]) <= int(driver.split(".")[0]):
        return []
    message = f"torch is built for CUDA {build.cuda}, but the driver supports CUDA up to {driver}"
    return [Finding("error", "nvidia", message, "update the driver, or install a torch built for that CUDA")]


def import_failures(names: tuple[str, ...] = MODULES) -> list[Finding]:
    """Return a finding with the error message for each installed library that does not load."""
    installed = [name for name in names if has(name)]
    with ThreadPoolExecutor(max(1, len(installed))) as pool:
        return [finding for finding in pool.map(_import, installed) if finding]


def _import(name: str) -> Finding | None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    _, problem = tool_output([interpreter(), "-c", f"import {name}"], environment, IMPORT_TIMEOUT_S)
    if not problem:
        return None
    message = problem.partition(": ")[2] or problem
    return Finding("error", name, f"it is installed but does not load: {message}", "install the release for this torch")
