"""NVIDIA GPUs through NVML (nvidia-ml-py), which opens no CUDA context. A MIG slice is a device of its own.

`ask` is what NVML says as JSON-like data; `devices` makes our words of it. It runs in a child: NVML can hang.
"""

import math
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from cluster import catalogue
from cluster.vocabulary import Device, Finding
from workers.discovery.machine import Machine, sysfs_address

VENDOR = 0x10DE
DRIVER_MARKS = ("dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg")

# Of a card that the catalogue does not list: the next of these is what it is sold with, so that an A100 of 40 GB is not
# one of 80.
SOLD_GB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 94, 96, 141, 180, 192, 288)
NOT_MODEL = re.compile(r"NVIDIA|Tesla|Quadro|GeForce|Generation|PCIe|PCIE|SXM\d*|HBM\d*e?|NVL\d*|OAM|\d+GB", re.ASCII)


# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean heat or power slow the clock. Source: nvml.h.
SLOWED = {0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "the power supply"}
# A slice's index, so that it is no card's: 100 for each card and one for each slice.
SLICES_FROM = 100


def present(machine: Machine) -> bool:
    return any(machine.path(mark).exists() for mark in DRIVER_MARKS) or any(d.is_display for d in machine.pci(VENDOR))


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    cards = [d for d in machine.pci(VENDOR) if d.is_display]
    if not any(machine.path(mark).exists() for mark in DRIVER_MARKS):
        return [], [_no_driver(len(cards))] if cards else []
    if find_spec("pynvml") is None:
        return [], [_no_library()]
    found, findings = devices(ask(), machine.visible("CUDA_VISIBLE_DEVICES"), machine)
    return found, findings + _no_access(machine, found)


def devices(
    said: dict[str, Any], visible: list[str] | None, machine: Machine | None = None
) -> tuple[list[Device], list[Finding]]:
    """`said` is what `ask` returns. Devices outside `visible` (numbers or UUID prefixes) belong to somebody else."""
    if error := said.get("error"):
        return [], [Finding("error", "nvidia", f"NVML: {error}", "driver and NVML library must be of one version")]
    found: list[Device] = []
    for card in said["cards"]:
        own = [_slice(card, number, part, said, machine) for number, part in enumerate(card.get("slices", []))]
        found += own if card.get("mig") and own else [_device(card, said, machine)]
    seen = [d for d in found if _is_visible(d, visible)]
    uuids = {d.uuid for d in seen}
    shown = [c for c in said["cards"] if c["uuid"] in uuids or uuids & {s["uuid"] for s in c.get("slices", [])}]
    return seen, [finding for card in shown for finding in _health(card)]


def _is_visible(device: Device, visible: list[str] | None) -> bool:
    return visible is None or any(
        v == str(device.index) or (v.startswith(("GPU-", "MIG-")) and device.uuid.startswith(v)) for v in visible
    )


def _device(card: dict[str, Any], said: dict[str, Any], machine: Machine | None) -> Device:
    total, address = card.get("total_bytes"), sysfs_address(str(card.get("pci", "")))
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
        unavailable_reason="MIG is on, and no slice has been made: nvidia-smi mig -cgi" if card.get("mig") else "",
        pci_address=address,
        numa_node=machine.numa_node(address) if machine and address else None,
        properties={"cuda_driver": said.get("cuda", ""), "power_limit_w": card.get("power_limit_w")},
    )


def _slice(
    card: dict[str, Any], number: int, part: dict[str, Any], said: dict[str, Any], machine: Machine | None
) -> Device:
    """`NVIDIA H100 80GB HBM3 MIG 1g.10gb` is of kind `nvidia:H100-80GB-MIG-1g.10gb`; it is shown by its UUID."""
    whole = _device({**card, "mig": False}, said, machine)
    profile = catalogue.model_name(part["name"].rpartition("MIG ")[2])
    return Device(
        backend="nvidia",
        kind=f"{whole.kind}-MIG-{profile}",
        index=SLICES_FROM * (card["index"] + 1) + number,
        name=part["name"],
        uuid=part["uuid"],
        total_memory_bytes=part.get("total_bytes"),
        free_memory_bytes=part.get("free_bytes"),
        driver_version=whole.driver_version,
        architecture=whole.architecture,
        pci_address=whole.pci_address,
        numa_node=whole.numa_node,
        properties={**whole.properties, "visible_as": part["uuid"], "slice_of": card["uuid"]},
    )


def _health(card: dict[str, Any]) -> list[Finding]:
    """Memory errors that no code could correct, rows that could not be replaced, and clocks that heat slows."""
    who, told = f"GPU {card['index']} ({card['name']})", []
    if card.get("ecc_uncorrected"):
        message = f"{who} has had {card['ecc_uncorrected']} memory errors since boot that ECC could not correct"
        told.append(Finding("error", "nvidia", message, "reset the GPU or reboot; if they come back, have it replaced"))
    if card.get("row_remap_failed"):
        told.append(Finding("error", "nvidia", f"{who} has no spare memory rows left", "have the card replaced"))
    causes = [cause for bit, cause in SLOWED.items() if (card.get("slowed") or 0) & bit]
    if causes:
        message = f"{who} runs below its clock because of {' and '.join(causes)}"
        told.append(Finding("warning", "nvidia", message, "check fans, inlet temperature and power"))
    return told


def _no_access(machine: Machine, found: list[Device]) -> list[Finding]:
    cards = machine.glob("dev/nvidia[0-9]*")
    if not found or not cards or any(machine.may_use(card) for card in cards):
        return []
    return [Finding("error", "nvidia", "no access to /dev/nvidia*", "give this user or container the device files")]


def model(name: str, total_bytes: int | None) -> str:
    """`NVIDIA A100-SXM4-40GB` -> `A100-40GB`. The size is NVML's: the 480GB in `GH200 480GB` is the CPU's memory.

    A card that nobody lists is called by its name and size, `RTX-9999-24GB`.
    """
    words = [w for w in re.split(r"[\s-]+", name) if w and not NOT_MODEL.fullmatch(w)]
    short = catalogue.model_name("-".join(words))
    known = (catalogue.found("nvidia", name=n, memory_bytes=total_bytes) for n in (name, short))
    if card := next(filter(None, known), None):
        return card.kind.partition(":")[2]
    if total_bytes is None:
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


def _optional(nvml: Any, read: Callable[..., Any], *given: Any) -> Any:
    try:
        return read(*given)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_NotFound):
        return None


def _ask_card(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def optional(read: Callable[..., Any], *more: Any) -> Any:
        return _optional(nvml, read, handle, *more)

    memory = optional(nvml.nvmlDeviceGetMemoryInfo)
    mig = optional(nvml.nvmlDeviceGetMigMode)
    power_mw = optional(nvml.nvmlDeviceGetEnforcedPowerLimit)
    remapped = optional(nvml.nvmlDeviceGetRemappedRows)
    uncorrected, since_boot = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return {
        "index": index,
        "name": nvml.nvmlDeviceGetName(handle),
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "total_bytes": memory and memory.total,
        "free_bytes": memory and memory.free,
        "pci": nvml.nvmlDeviceGetPciInfo(handle).busId,
        "capability": optional(nvml.nvmlDeviceGetCudaComputeCapability),
        "mig": bool(mig and mig[0]),
        "slices": _ask_slices(nvml, handle) if mig and mig[0] else [],
        "ecc_uncorrected": optional(nvml.nvmlDeviceGetTotalEccErrors, uncorrected, since_boot),
        "row_remap_failed": bool(remapped and remapped[3]),
        "slowed": optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        "power_limit_w": power_mw and power_mw / 1000,
    }


def _ask_slices(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        part = _optional(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if part is not None:
            memory = _optional(nvml, nvml.nvmlDeviceGetMemoryInfo, part)
            found.append(
                {
                    "name": nvml.nvmlDeviceGetName(part),
                    "uuid": nvml.nvmlDeviceGetUUID(part),
                    "total_bytes": memory and memory.total,
                    "free_bytes": memory and memory.free,
                }
            )
    return found
