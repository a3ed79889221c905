"""NVIDIA GPUs through NVML (nvidia-ml-py), asked in a child process: NVML opens no CUDA context, but it can hang.

Run as `python -m workers.discovery.nvidia` it prints what NVML says as JSON; `devices` makes our words of it.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster.vocabulary import Device, Finding
from workers.discovery.machine import Machine, tool_output

VENDOR = 0x10DE
DRIVER_MARKS = ("dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg")

# Models sold with one memory size carry none in their kind; all others do, so that an A100 of 40 GB is not one of 80.
ONE_SIZE = frozenset(
    {"T4", "L4", "L40", "L40S", "A10", "A10G", "A30", "A40", "P4", "P40", "H200", "B200", "B300", "GB200", "GB300"}
)
SOLD_GB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 94, 96, 141, 180, 192, 288)
NOT_MODEL = re.compile(r"NVIDIA|Tesla|Quadro|GeForce|Generation|PCIe|PCIE|SXM\d*|HBM\d*e?|NVL\d*|OAM|\d+GB", re.ASCII)


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    cards = [d for d in machine.pci(VENDOR) if d.is_display]
    if not any(machine.path(mark).exists() for mark in DRIVER_MARKS):
        return [], [_no_driver(len(cards))] if cards else []
    if find_spec("pynvml") is None:
        return [], [_no_library()]
    child = [sys.executable, "-P", "-m", __name__]
    said, problem = tool_output(child, {**machine.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    if problem:
        return [], [
            Finding("error", "nvidia", f"NVML does not answer: {problem}", "run nvidia-smi; a reboot may be needed")
        ]
    return devices(json.loads(said), machine.visible("CUDA_VISIBLE_DEVICES"))


def devices(said: dict[str, Any], visible: list[str] | None) -> tuple[list[Device], list[Finding]]:
    """`said` is what `ask` returns. Devices outside `visible` (numbers or UUID prefixes) belong to somebody else."""
    if error := said.get("error"):
        return [], [Finding("error", "nvidia", f"NVML: {error}", "driver and NVML library must be of one version")]
    cards = [c for c in said["cards"] if _is_visible(c, visible)]
    mig = [c["index"] for c in cards if c.get("mig")]
    findings = (
        []
        if not mig
        else [Finding("warning", "nvidia", f"MIG is on for GPU {mig}", "Polyfleet leases whole GPUs only")]
    )
    return [_device(c, said) for c in cards], findings


def _is_visible(card: dict[str, Any], visible: list[str] | None) -> bool:
    return visible is None or any(
        v == str(card["index"]) or (v.startswith("GPU-") and card["uuid"].startswith(v)) for v in visible
    )


def _device(card: dict[str, Any], said: dict[str, Any]) -> Device:
    total = card.get("total_bytes")
    return Device(
        backend="nvidia",
        kind=f"nvidia:{model(card['name'], total)}",
        index=card["index"],
        name=card["name"],
        uuid=card["uuid"],
        total_memory_bytes=total,
        free_memory_bytes=card.get("free_bytes"),
        driver_version=said.get("driver", ""),
        architecture=f"sm_{card['capability'][0]}{card['capability'][1]}" if card.get("capability") else "",
        unavailable_reason="MIG is on: Polyfleet leases whole GPUs only" if card.get("mig") else "",
        properties={
            "pci": card.get("pci", ""),
            "cuda_driver": said.get("cuda", ""),
            "power_limit_w": card.get("power_limit_w"),
        },
    )


def model(name: str, total_bytes: int | None) -> str:
    """`NVIDIA A100-SXM4-40GB` -> `A100-40GB`. The size is NVML's: the 480GB in `GH200 480GB` is the CPU's memory."""
    words = [w for w in re.split(r"[\s-]+", name) if w and not NOT_MODEL.fullmatch(w)]
    short = "-".join(words) or "GPU"
    if short in ONE_SIZE or total_bytes is None:
        return short
    gib = total_bytes / 2**30
    return f"{short}-{next((size for size in SOLD_GB if size >= gib), math.ceil(gib))}GB"


def _no_driver(cards: int) -> Finding:
    return Finding(
        "warning", "nvidia", f"{cards} NVIDIA cards on the PCI bus, but no driver is loaded", "install NVIDIA's driver"
    )


def _no_library() -> Finding:
    return Finding(
        "error",
        "nvidia",
        "NVIDIA's driver is loaded, but nvidia-ml-py is not in this environment",
        "install the 'nvidia' extra",
    )


def ask() -> dict[str, Any]:
    """Everything we want of NVML, as JSON-like data: {"driver", "cuda", "cards": […]} or {"error"}."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        cards = [_ask_card(nvml, i) for i in range(nvml.nvmlDeviceGetCount())]
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "cards": cards,
        }
    except nvml.NVMLError as e:
        return {"error": str(e)}


def _ask_card(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def optional(read: Callable[[Any], Any]) -> Any:
        try:
            return read(handle)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
            return None

    memory = optional(nvml.nvmlDeviceGetMemoryInfo)
    mig = optional(nvml.nvmlDeviceGetMigMode)
    power_mw = optional(nvml.nvmlDeviceGetEnforcedPowerLimit)
    return {
        "index": index,
        "name": nvml.nvmlDeviceGetName(handle),
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "total_bytes": memory and memory.total,
        "free_bytes": memory and memory.free,
        "pci": nvml.nvmlDeviceGetPciInfo(handle).busId,
        "capability": optional(nvml.nvmlDeviceGetCudaComputeCapability),
        "mig": bool(mig and mig[0]),
        "power_limit_w": power_mw and power_mw / 1000,
    }


if __name__ == "__main__":
    os.write(1, json.dumps(ask()).encode())
