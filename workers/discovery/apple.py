"""The GPU of an Apple-silicon Mac, from system_profiler. Its memory is the machine's."""

import json
import re
from typing import Any

from cluster import catalogue
from cluster.types import Device, Finding
from workers.discovery.card_reply import Answer
from workers.discovery.card_reply import findings as unread
from workers.discovery.machine import Machine, tool_output
from workers.discovery.memory import device_memory

COMMAND = ["/usr/sbin/system_profiler", "-json", "SPHardwareDataType", "SPDisplaysDataType"]
BRAND = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]


def present(machine: Machine) -> bool:
    return machine.system == "Darwin"


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    if machine.system != "Darwin":
        return [], []
    told, problem = _profile(machine)
    if not _part(told, "SPHardwareDataType").get("chip_type"):  # the kernel knows the chip too
        brand, _ = tool_output(BRAND, machine.environ)
        told = {**told, "SPHardwareDataType": [{"chip_type": brand.strip()}]}
    remedy = "run system_profiler by hand"
    findings = (
        [Finding("warning", "apple", f"details of the GPU come from sysctl only: {problem}", remedy)] if problem else []
    )
    gpus = [Answer("the GPU", "system_profiler", _part(told, "SPDisplaysDataType"))]
    found = devices(told, machine, gpus[0])
    return found, findings + (unread("apple", gpus, remedy) if found else [])


def _profile(machine: Machine) -> tuple[dict[str, Any], str]:
    """(what system_profiler says, "") or ({}, why there is nothing)."""
    said, problem = tool_output(COMMAND, machine.environ)
    if problem:
        return {}, problem
    try:
        told = json.loads(said)
    except ValueError:
        return {}, f"system_profiler printed {said.strip()[:40]!r}, which is not JSON"
    return (told, "") if isinstance(told, dict) else ({}, "system_profiler printed no list of hardware")


def devices(said: Any, machine: Machine | None = None, gpu: Answer | None = None) -> list[Device]:
    """One device, or none on a Mac with an Intel CPU, whose GPU torch's MPS no longer supports. `gpu` is the part of
    `said` about the GPU of the chip.
    """
    hardware = Answer("this Mac", "system_profiler", _part(said, "SPHardwareDataType"))
    chip = hardware.text("chip_type")
    if not chip.startswith("Apple "):
        return []
    gpu = gpu or Answer("the GPU", "system_profiler", _part(said, "SPDisplaysDataType"))
    known = catalogue.match_device("apple", name=chip)
    kind = known.kind if known else f"apple:{catalogue.model_name(chip.removeprefix('Apple '))}"
    architecture = known.architecture if known else "arm64"
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


def _part(said: Any, name: str) -> dict[str, Any]:
    """Of a Mac's hardware, or of the GPU inside its chip (displays have more of them)."""
    rows = said.get(name) if isinstance(said, dict) else None
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    inside = (row for row in rows if str(row.get("sppci_model", "")).startswith("Apple "))
    return next(inside, {}) if name == "SPDisplaysDataType" else next(iter(rows), {})


def _bytes(text: str) -> int | None:
    """`32 GB`, which Apple writes for 32 GiB."""
    match = re.fullmatch(r"(\d+) (GB|TB)", text)
    return int(match[1]) << (30 if match[2] == "GB" else 40) if match else None
