"""The GPU of an Apple-silicon Mac, from system_profiler. It uses the machine's memory."""

import json
import re
from typing import Any

from cluster import catalogue
from cluster.types import Device, Finding
from workers.devices.discovery.card_reply import CardReply
from workers.devices.discovery.card_reply import findings as unread
from workers.devices.discovery.machine import Machine, tool_output
from workers.devices.discovery.memory import device_memory

COMMAND = ["/usr/sbin/system_profiler", "-json", "SPHardwareDataType", "SPDisplaysDataType"]
BRAND = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]


def present(machine: Machine) -> bool:
    return machine.system == "Darwin"


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    if machine.system != "Darwin":
        return [], []
    profile, problem = _profile(machine)
    if not _part(profile, "SPHardwareDataType").get("chip_type"):  # the kernel reports the chip too
        brand, _ = tool_output(BRAND, machine.environ)
        profile = {**profile, "SPHardwareDataType": [{"chip_type": brand.strip()}]}
    remedy = "run system_profiler by hand"
    findings = (
        [Finding("warning", "apple", f"details of the GPU come from sysctl only: {problem}", remedy)] if problem else []
    )
    gpus = [CardReply("the GPU", "system_profiler", _part(profile, "SPDisplaysDataType"))]
    gpu_devices = devices(profile, machine, gpus[0])
    return gpu_devices, findings + (unread("apple", gpus, remedy) if gpu_devices else [])


def _profile(machine: Machine) -> tuple[dict[str, Any], str]:
    """Return (output of system_profiler, "") or ({}, reason)."""
    output, problem = tool_output(COMMAND, machine.environ)
    if problem:
        return {}, problem
    try:
        profile = json.loads(output)
    except ValueError:
        return {}, f"system_profiler printed {output.strip()[:40]!r}, which is not JSON"
    return (profile, "") if isinstance(profile, dict) else ({}, "system_profiler printed no list of hardware")


def devices(profile: Any, machine: Machine | None = None, gpu: CardReply | None = None) -> list[Device]:
    """Return one device, or none on a Mac with an Intel CPU, whose GPU torch's MPS no longer supports.

    `gpu` is the part of `profile` about the chip's GPU.
    """
    hardware = CardReply("this Mac", "system_profiler", _part(profile, "SPHardwareDataType"))
    chip = hardware.text("chip_type")
    if not chip.startswith("Apple "):
        return []
    gpu = gpu or CardReply("the GPU", "system_profiler", _part(profile, "SPDisplaysDataType"))
    row = catalogue.match_device("apple", name=chip)
    kind = row.kind if row else f"apple:{catalogue.model_name(chip.removeprefix('Apple '))}"
    architecture = row.architecture if row else "arm64"
    memory = device_memory(kind, architecture, machine, _bytes(hardware.text("physical_memory")))
    return [
        Device(
            backend="apple",
            kind=kind,
            index=0,
            name=chip,
            uuid=hardware.text("platform_UUID"),
            total_memory_bytes=memory.total_bytes,
            free_memory_bytes=memory.free_bytes,
            architecture=architecture,
            unified_memory=memory.unified,
            properties={"gpu_cores": gpu.number("sppci_cores")},
        )
    ]


def _part(profile: Any, name: str) -> dict[str, Any]:
    """Return the row of the Mac's hardware, or of its chip's GPU (SPDisplaysDataType may list other GPUs)."""
    rows = profile.get(name) if isinstance(profile, dict) else None
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    chip_gpus = (row for row in rows if str(row.get("sppci_model", "")).startswith("Apple "))
    return next(chip_gpus, {}) if name == "SPDisplaysDataType" else next(iter(rows), {})


def _bytes(text: str) -> int | None:
    """Parse `32 GB`, by which Apple means 32 GiB."""
    match = re.fullmatch(r"(\d+) (GB|TB)", text)
    return int(match[1]) << (30 if match[2] == "GB" else 40) if match else None
