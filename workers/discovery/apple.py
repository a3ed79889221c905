"""The GPU of an Apple-silicon Mac, from system_profiler. Its memory is the machine's."""

import json
import re
from typing import Any

from cluster import catalogue
from cluster.vocabulary import Device, Finding
from workers.discovery.machine import Machine, tool_output

COMMAND = ["/usr/sbin/system_profiler", "-json", "SPHardwareDataType", "SPDisplaysDataType"]


def present(machine: Machine) -> bool:
    return machine.system == "Darwin"


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    if machine.system != "Darwin":
        return [], []
    said, problem = tool_output(COMMAND, machine.environ)
    if problem:
        return [], [Finding("warning", "apple", problem, "run system_profiler by hand")]
    return devices(json.loads(said)), []


def devices(said: dict[str, Any]) -> list[Device]:
    """One device, or none on a Mac with an Intel CPU, whose GPU torch's MPS no longer supports."""
    hardware = (said.get("SPHardwareDataType") or [{}])[0]
    chip = str(hardware.get("chip_type", ""))
    if not chip.startswith("Apple "):
        return []
    gpu: dict[str, Any] = next((g for g in said.get("SPDisplaysDataType", []) if g.get("sppci_model") == chip), {})
    known = catalogue.found("apple", name=chip)
    return [
        Device(
            backend="apple",
            kind=known.kind if known else f"apple:{catalogue.model_name(chip.removeprefix('Apple '))}",
            index=0,
            name=chip,
            uuid=str(hardware.get("platform_UUID", "")),
            total_memory_bytes=_bytes(str(hardware.get("physical_memory", ""))),
            architecture=known.architecture if known else "arm64",
            unified_memory=True,
            properties={"gpu_cores": int(gpu["sppci_cores"]) if "sppci_cores" in gpu else None},
        )
    ]


def _bytes(text: str) -> int | None:
    """`32 GB`, which Apple writes for 32 GiB."""
    match = re.fullmatch(r"(\d+) (GB|TB)", text)
    return int(match[1]) << (30 if match[2] == "GB" else 40) if match else None
