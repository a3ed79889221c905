"""NVIDIA GPUs through NVML (nvidia-ml-py), which opens no CUDA context. A MIG slice is a device of its own.

`nvidia_nvml.ask` is what NVML says as JSON-like data; `devices` makes our words of it. It runs in a child, for NVML can
hang.
"""

import math
import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from cluster import catalogue
from cluster.types import Device, Finding, Scalar
from workers.discovery import nvidia_nvml as nvml
from workers.discovery.machine import Machine, sysfs_address
from workers.discovery.memory import device_memory

VENDOR = 0x10DE
DRIVER_MARKS = ("dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg")

# Of a card that the catalogue does not list: the next of these is what it is sold with, so that an A100 of 40 GB is not
# one of 80.
SOLD_GB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 94, 96, 141, 180, 192, 288)
NOT_MODEL = re.compile(
    r"NVIDIA|Tesla|Quadro|GeForce|Generation|PCIe|PCIE|SXM\d*|HBM\d*e?|NVL\d*|OAM|\d+GB|\(.*\)", re.ASCII
)
NO_NAMES = frozenset({"", "Graphics-Device", "Device"})
"""What is left of the name that a driver gives a card that is newer than it."""

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
    found, findings = devices(query_nvml(), machine.visible("CUDA_VISIBLE_DEVICES"), machine)
    return found, findings + _no_access(machine, found)


def query_nvml() -> dict[str, Any]:
    """What NVML says, as `nvidia_nvml.ask` describes it."""
    import pynvml

    return nvml.ask(pynvml)


def devices(
    said: dict[str, Any], visible: list[str] | None, machine: Machine | None = None
) -> tuple[list[Device], list[Finding]]:
    """`said` is what `ask` returns. Devices outside `visible` (numbers or UUID prefixes) belong to somebody else."""
    if error := said.get("error"):
        return [], [Finding("error", "nvidia", f"NVML: {error}", nvml.remedy(said.get("code", 18)))]
    # CUDA does not count a card that is lost, so the numbers of those behind it are not NVML's.
    by_uuid = any(nvml.unusable_reason(card.get("failed", {})) for card in said["cards"])
    found: list[Device] = []
    findings: list[Finding] = []
    failed = {"this machine": said.get("failed", {})}
    for card in said["cards"]:
        shown = [d for d in _of_card(card, said, machine, by_uuid) if _is_visible(d, visible)]
        if shown:
            found += shown
            findings += _health(card)
            failed |= _failed(card, shown[0].unified_memory)
    return found, [*findings, *nvml.findings(failed)]


def _failed(card: dict[str, Any], unified: bool) -> dict[str, dict[str, tuple[int, str]]]:
    """Calls without an answer by card and slice. Where memory is unified, NVML rightly supports none of the card's."""
    own = {
        name: why
        for name, why in card.get("failed", {}).items()
        if not (unified and name == nvml.MEMORY and why[0] == nvml.NOT_SUPPORTED)
    }
    parts = {f"{_who(card)}, slice {n}": part.get("failed", {}) for n, part in enumerate(card.get("slices", []))}
    return {_who(card): own, **parts}


def _of_card(card: dict[str, Any], said: dict[str, Any], machine: Machine | None, by_uuid: bool) -> list[Device]:
    """Its slices where MIG is on, else the card."""
    whole = _device(card, said, machine, by_uuid)
    slices = card.get("slices", []) if card.get("mig") and not nvml.unusable_reason(card.get("failed", {})) else []
    return [_slice(card, number, part, whole) for number, part in enumerate(slices)] or [whole]


def _who(card: dict[str, Any]) -> str:
    return f"GPU {card['index']}" + (f" ({card['name']})" if card.get("name") else "")


def _is_visible(device: Device, visible: list[str] | None) -> bool:
    return visible is None or any(
        v == str(device.index) or (v.startswith(("GPU-", "MIG-")) and device.uuid.startswith(v)) for v in visible
    )


def _device(card: dict[str, Any], said: dict[str, Any], machine: Machine | None, by_uuid: bool) -> Device:
    address = sysfs_address(str(card.get("pci", "")))
    kind = f"nvidia:{model(card.get('name', ''), card.get('total_bytes'), _pci_device(card, machine, address))}"
    architecture = f"sm_{card['capability'][0]}{card['capability'][1]}" if card.get("capability") else ""
    memory = device_memory(kind, architecture, machine, card.get("total_bytes"), card.get("free_bytes"))
    shown: dict[str, Scalar] = {"visible_as": card["uuid"]} if by_uuid and card.get("uuid") else {}
    return Device(
        backend="nvidia",
        kind=kind,
        index=card["index"],
        name=card.get("name") or f"NVIDIA GPU {card['index']}",
        uuid=card.get("uuid", ""),
        total_memory_bytes=memory.total_bytes,
        free_memory_bytes=memory.free_bytes,
        driver_version=said.get("driver", ""),
        architecture=architecture,
        unavailable_reason=_unavailable(card),
        unified_memory=memory.unified,
        pci_address=address,
        numa_node=machine.numa_node(address) if machine and address else None,
        properties={"cuda_driver": said.get("cuda", ""), "power_limit_w": card.get("power_limit_w"), **shown},
    )


def _unavailable(card: dict[str, Any]) -> str:
    failed = card.get("failed", {})
    if reason := nvml.unusable_reason(failed):
        return reason
    if not card.get("mig"):
        return ""
    if nvml.SLICES in failed:
        code, words = failed[nvml.SLICES]
        return f"MIG is on, but its slices are unknown: {nvml.SLICES} failed: {words}; {nvml.remedy(code)}"
    return "MIG is on, but it has no slices: create some with `nvidia-smi mig -cgi PROFILE -C`"


def _pci_device(card: dict[str, Any], machine: Machine | None, address: str) -> int | None:
    told: int | None = card.get("pci_device")
    return told or (machine.number(f"sys/bus/pci/devices/{address}/device") if machine and address else None)


def _slice(card: dict[str, Any], number: int, part: dict[str, Any], whole: Device) -> Device:
    """`NVIDIA H100 80GB HBM3 MIG 1g.10gb` is of kind `nvidia:H100-80GB-MIG-1g.10gb`; it is shown by its UUID."""
    profile = part["name"].rpartition("MIG ")[2]
    reason = nvml.unusable_reason(part.get("failed", {}))
    if not (profile and part["uuid"]):
        reason = reason or f"NVML did not report the {'UUID' if profile else 'profile'} of this slice"
    return replace(
        whole,
        kind=f"{whole.kind}-MIG-{catalogue.model_name(profile) if profile else 'unknown'}",
        index=SLICES_FROM * (card["index"] + 1) + number,
        name=part["name"] or f"{whole.name} MIG",
        uuid=part["uuid"],
        total_memory_bytes=part.get("total_bytes"),
        free_memory_bytes=part.get("free_bytes"),
        unavailable_reason=reason,
        properties={**whole.properties, "visible_as": part["uuid"], "slice_of": card.get("uuid", "")},
    )


def _health(card: dict[str, Any]) -> list[Finding]:
    """Memory errors that no code could correct, rows that could not be replaced, and clocks that heat slows."""
    who, told = _who(card), []
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


def model(name: str, total_bytes: int | None, pci_device: int | None = None) -> str:
    """`NVIDIA A100-SXM4-40GB` -> `A100-40GB`. The size is NVML's: the 480GB in `GH200 480GB` is the CPU's memory.

    A card without a name is known by its PCI id. One that nobody lists is called by its name and size, `RTX-9999-24GB`,
    and by its PCI id, `0x2b99`, where its driver has no name for it.
    """
    words = [w for w in re.split(r"[\s-]+", name) if w and not NOT_MODEL.fullmatch(w)]
    short = catalogue.model_name("-".join(words)) if words else ""
    pci_id = f"{pci_device:04x}" if pci_device else ""
    known = (
        *(catalogue.match_device("nvidia", name=n, memory_bytes=total_bytes) for n in (name, short)),
        catalogue.match_device("nvidia", pci_id=pci_id, memory_bytes=total_bytes) if pci_id else None,
    )
    if card := next(filter(None, known), None):
        return card.kind.partition(":")[2]
    if short in NO_NAMES:
        return f"0x{pci_id}" if pci_id else "GPU"
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
