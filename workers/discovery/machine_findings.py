"""What `doctor` tells of the machine as a whole: limits below it, the kernel's reports of faulty GPUs, old drivers."""

import os
import re
from collections import Counter
from collections.abc import Sequence

import psutil

from cluster.types import Device, Finding
from workers.attempt import cgroup
from workers.discovery.machine import Machine
from workers.discovery.resource_limits import cores, memory
from workers.discovery.versions import TorchBuild, torch_build

KERNEL_LOG_BYTES = 1 << 20
# What the commonest Xids mean. Source: NVIDIA's "XID Errors" document.
XIDS = {13: "graphics engine exception", 31: "memory page fault", 48: "double-bit ECC error", 63: "row remapping",
        64: "row remapping failed", 74: "NVLink error", 79: "GPU has fallen off the bus", 94: "contained ECC error",
        95: "uncontained ECC error", 119: "GSP timeout"}  # fmt: skip
# An application's own fault, not the card's.
HARMLESS_XIDS = frozenset({13, 31, 43, 45})


def health(devices: Sequence[Device], machine: Machine) -> list[Finding]:
    return [*_limits(machine), *_groups(machine), *_xids(machine, devices), *old_drivers(devices, torch_build())]


def _limits(machine: Machine) -> list[Finding]:
    """Not wrong, but a surprise to whoever counts on the whole machine."""
    told = []
    have, allowed = psutil.cpu_count() or 1, cores(machine)
    if allowed < have:
        message = f"{allowed} of {have} CPUs may be used here: a control group or the affinity mask limits it"
        told.append(Finding("info", "limits", message, "raise the container's CPU limit if that is too few"))
    total, _ = memory(machine)
    whole = psutil.virtual_memory().total
    if total < whole:
        message = f"{total / 2**30:.1f} of {whole / 2**30:.1f} GiB of memory may be used: a control group limits it"
        told.append(Finding("info", "limits", message, "raise the container's memory limit if that is too little"))
    return told


def _groups(machine: Machine) -> list[Finding]:
    """Attempts end without them too, but for one that knows how they are found and how they are killed."""
    found = cgroup.find(machine.environ, machine.root)
    if found.root is not None or not machine.text("proc/self/cgroup"):
        return []
    message = f"attempts here cannot be limited, measured or killed as a control group each: {found.why_not}"
    return [Finding("info", "control groups", message, cgroup.SERVICE)]


def _xids(machine: Machine, devices: Sequence[Device]) -> list[Finding]:
    """Counted from the kernel's log, where this process may read it."""
    if not any(d.backend == "nvidia" for d in devices):
        return []
    found = Counter(re.findall(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)", kernel_log(machine)))
    return [
        Finding(
            "error",
            "nvidia",
            f"the driver reported Xid {number} ({XIDS.get(int(number), 'see NVIDIA')}) {times}x for the GPU at {where}",
            "reset the GPU or reboot; if it comes back, have the card checked",
        )
        for (where, number), times in sorted(found.items())
        if int(number) not in HARMLESS_XIDS
    ]


def kernel_log(machine: Machine) -> str:
    """What /dev/kmsg holds now; "" where reading it is a privilege we lack. It never blocks."""
    try:
        log = os.open(machine.path("dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    lines: list[bytes] = []
    try:
        while sum(map(len, lines)) < KERNEL_LOG_BYTES and (line := os.read(log, 8192)):
            lines.append(line)
    except OSError:  # BlockingIOError: there is no more; EPIPE: lines were overwritten while we read
        pass
    finally:
        os.close(log)
    return b"".join(lines).decode(errors="replace")


def old_drivers(devices: Sequence[Device], build: TorchBuild | None) -> list[Finding]:
    """CUDA runs on drivers of its own major version or newer. Source: NVIDIA's CUDA compatibility, minor versions."""
    driver = next((str(d.properties["cuda_driver"]) for d in devices if d.properties.get("cuda_driver")), "")
    if build is None or not build.cuda or not driver or int(build.cuda.split(".")[0]) <= int(driver.split(".")[0]):
        return []
    message = f"torch is built for CUDA {build.cuda}, and the driver supports CUDA up to {driver}"
    return [Finding("error", "nvidia", message, "update the driver, or install a torch built for that CUDA")]
