"""NVIDIA GPUs, through NVML (nvidia-ml-py), which opens no CUDA context. Each MIG slice is a device.

`nvidia_nvml.query` returns NVML's replies as JSON-like data, and `devices` converts them. Runs in a child process,
because NVML can hang.
"""

import math
import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from cluster import catalogue
from cluster.types import Device, Finding, Scalar
from workers.devices.discovery.machine import Machine, sysfs_address
from workers.devices.discovery.memory import device_memory
from workers.devices.discovery.vendors import nvidia_nvml as nvml

VENDOR = 0x10DE
DRIVER_MARKS = ("dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg")

# Memory sizes that cards are sold with. The kind of a card that is not in the catalogue gets the next of these, so that
# variants with different sizes, such as A100 with 40 and 80 GB, are different kinds.
SOLD_GB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 94, 96, 141, 180, 192, 288)
NOT_MODEL = re.compile(
    r"NVIDIA|Tesla|Quadro|GeForce|Generation|PCIe|PCIE|SXM\d*|HBM\d*e?|NVL\d*|OAM|\d+GB|\(.*\)", re.ASCII
)
NO_NAMES = frozenset({"", "Graphics-Device", "Device"})
"""Remainders of the generic names that a driver gives to cards newer than itself."""

# Bits of nvmlDeviceGetCurrentClocksEventReasons for throttling by heat or power. Source: nvml.h.
THROTTLE_CAUSES = {0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "the power supply"}
# Factor in a slice's index, 100 * (card + 1) + slice, which keeps it distinct from the indices of cards.
SLICE_INDEX_FACTOR = 100


def present(machine: Machine) -> bool:
    return any(machine.path(mark).exists() for mark in DRIVER_MARKS) or any(d.is_display for d in machine.pci(VENDOR))


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    cards = [d for d in machine.pci(VENDOR) if d.is_display]
    if not any(machine.path(mark).exists() for mark in DRIVER_MARKS):
        return [], [_no_driver(len(cards))] if cards else []
    if find_spec("pynvml") is None:
        return [], [_no_library()]
    visible_devices, findings = devices(query_nvml(), machine.visible("CUDA_VISIBLE_DEVICES"), machine)
    return visible_devices, findings + _no_access(machine, visible_devices)


def query_nvml() -> dict[str, Any]:
    """Return NVML's replies; see `nvidia_nvml.query`."""
    import pynvml

    return nvml.query(pynvml)


def devices(
    reply: dict[str, Any], visible: list[str] | None, machine: Machine | None = None
) -> tuple[list[Device], list[Finding]]:
    """Convert the result of `nvidia_nvml.query`. Leaves out devices not in `visible` (numbers or UUID prefixes)."""
    if error := reply.get("error"):
        return [], [Finding("error", "nvidia", f"NVML: {error}", nvml.remedy(reply.get("code", 18)))]
    # CUDA does not count a lost card, so the CUDA numbers of later cards differ from NVML's: select by UUID.
    by_uuid = any(nvml.unusable_reason(card.get("failed", {})) for card in reply["cards"])
    all_devices: list[Device] = []
    findings: list[Finding] = []
    failed = {"this machine": reply.get("failed", {})}
    for card in reply["cards"]:
        card_devices = [d for d in _of_card(card, reply, machine, by_uuid) if _is_visible(d, visible)]
        if card_devices:
            all_devices += card_devices
            findings += _health(card)
            failed |= _failed(card, card_devices[0].unified_memory)
    return all_devices, [*findings, *nvml.findings(failed)]


def _failed(card: dict[str, Any], unified: bool) -> dict[str, dict[str, tuple[int, str]]]:
    """Collect failed calls by card and slice. With unified memory, NVML rightly does not support the memory query."""
    of_card = {
        name: error
        for name, error in card.get("failed", {}).items()
        if not (unified and name == nvml.MEMORY and error[0] == nvml.NOT_SUPPORTED)
    }
    parts = {f"{_card_label(card)}, slice {n}": part.get("failed", {}) for n, part in enumerate(card.get("slices", []))}
    return {_card_label(card): of_card, **parts}


def _of_card(card: dict[str, Any], reply: dict[str, Any], machine: Machine | None, by_uuid: bool) -> list[Device]:
    """Return the devices of a card: its slices if MIG is on, else the card."""
    card_device = _device(card, reply, machine, by_uuid)
    slices = card.get("slices", []) if card.get("mig") and not nvml.unusable_reason(card.get("failed", {})) else []
    return [_slice(card, number, part, card_device) for number, part in enumerate(slices)] or [card_device]


def _card_label(card: dict[str, Any]) -> str:
    return f"GPU {card['index']}" + (f" ({card['name']})" if card.get("name") else "")


def _is_visible(device: Device, visible: list[str] | None) -> bool:
    return visible is None or any(
        v == str(device.index) or (v.startswith(("GPU-", "MIG-")) and device.uuid.startswith(v)) for v in visible
    )


def _device(card: dict[str, Any], reply: dict[str, Any], machine: Machine | None, by_uuid: bool) -> Device:
    address = sysfs_address(str(card.get("pci", "")))
    kind = f"nvidia:{model(card.get('name', ''), card.get('total_bytes'), _pci_device(card, machine, address))}"
    architecture = f"sm_{card['capability'][0]}{card['capability'][1]}" if card.get("capability") else ""
    memory = device_memory(kind, architecture, machine, card.get("total_bytes"), card.get("free_bytes"))
    visibility: dict[str, Scalar] = {"visible_as": card["uuid"]} if by_uuid and card.get("uuid") else {}
    return Device(
        backend="nvidia",
        kind=kind,
        index=card["index"],
        name=card.get("name") or f"NVIDIA GPU {card['index']}",
        uuid=card.get("uuid", ""),
        total_memory_bytes=memory.total_bytes,
        free_memory_bytes=memory.free_bytes,
        driver_version=reply.get("driver", ""),
        architecture=architecture,
        unavailable_reason=_unavailable(card),
        unified_memory=memory.unified,
        pci_address=address,
        numa_node=machine.numa_node(address) if machine and address else None,
        properties={"cuda_driver": reply.get("cuda", ""), "power_limit_w": card.get("power_limit_w"), **visibility},
    )


def _unavailable(card: dict[str, Any]) -> str:
    failed = card.get("failed", {})
    if reason := nvml.unusable_reason(failed):
        return reason
    if not card.get("mig"):
        return ""
    if nvml.SLICES in failed:
        code, error = failed[nvml.SLICES]
        return f"MIG is on, but its slices are unknown: {nvml.SLICES} failed: {error}; {nvml.remedy(code)}"
    return "MIG is on, but it has no slices: create some with `nvidia-smi mig -cgi PROFILE -C`"


def _pci_device(card: dict[str, Any], machine: Machine | None, address: str) -> int | None:
    reported: int | None = card.get("pci_device")
    return reported or (machine.number(f"sys/bus/pci/devices/{address}/device") if machine and address else None)


def _slice(card: dict[str, Any], number: int, part: dict[str, Any], card_device: Device) -> Device:
    """Device of a MIG slice. `NVIDIA H100 80GB HBM3 MIG 1g.10gb` has the kind `nvidia:H100-80GB-MIG-1g.10gb`; its UUID
    makes it visible to a process.
    """
    profile = part["name"].rpartition("MIG ")[2]
    reason = nvml.unusable_reason(part.get("failed", {}))
    if not (profile and part["uuid"]):
        reason = reason or f"NVML did not return the {'UUID' if profile else 'profile'} of this slice"
    return replace(
        card_device,
        kind=f"{card_device.kind}-MIG-{catalogue.model_name(profile) if profile else 'unknown'}",
        index=SLICE_INDEX_FACTOR * (card["index"] + 1) + number,
        name=part["name"] or f"{card_device.name} MIG",
        uuid=part["uuid"],
        total_memory_bytes=part.get("total_bytes"),
        free_memory_bytes=part.get("free_bytes"),
        unavailable_reason=reason,
        properties={**card_device.properties, "visible_as": part["uuid"], "slice_of": card.get("uuid", "")},
    )


def _health(card: dict[str, Any]) -> list[Finding]:
    """Report uncorrectable memory errors, exhausted spare rows, and throttled clocks."""
    label, findings = _card_label(card), []
    if card.get("ecc_uncorrected"):
        message = f"{label} has had {card['ecc_uncorrected']} memory errors since boot that ECC could not correct"
        findings.append(
            Finding("error", "nvidia", message, "reset the GPU or reboot; if they come back, have it replaced")
        )
    if card.get("row_remap_failed"):
        findings.append(Finding("error", "nvidia", f"{label} has no spare memory rows left", "have the card replaced"))
    causes = [cause for bit, cause in THROTTLE_CAUSES.items() if (card.get("slowed") or 0) & bit]
    if causes:
        message = f"{label} runs below its clock because of {' and '.join(causes)}"
        findings.append(Finding("warning", "nvidia", message, "check fans, inlet temperature and power"))
    return findings


def _no_access(machine: Machine, devices: list[Device]) -> list[Finding]:
    cards = machine.glob("dev/nvidia[0-9]*")
    if not devices or not cards or any(machine.may_use(card) for card in cards):
        return []
    return [Finding("error", "nvidia", "no access to /dev/nvidia*", "give this user or container the device files")]


def model(name: str, total_bytes: int | None, pci_device: int | None = None) -> str:
    """Model of a card: `NVIDIA A100-SXM4-40GB` -> `A100-40GB`.

    The size comes from NVML, because the 480GB in `GH200 480GB` is the CPU's memory. A card without a name is looked up
    by its PCI id. A card that is not in the catalogue is named by name and size, `RTX-9999-24GB`, or by its PCI id,
    `0x2b99`, if the driver has no name for it.
    """
    parts = [w for w in re.split(r"[\s-]+", name) if w and not NOT_MODEL.fullmatch(w)]
    short = catalogue.model_name("-".join(parts)) if parts else ""
    pci_id = f"{pci_device:04x}" if pci_device else ""
    candidates = (
        *(catalogue.match_device("nvidia", name=n, memory_bytes=total_bytes) for n in (name, short)),
        catalogue.match_device("nvidia", pci_id=pci_id, memory_bytes=total_bytes) if pci_id else None,
    )
    if card := next(filter(None, candidates), None):
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
        "NVIDIA's driver is loaded, but nvidia-ml-py is not installed in this environment",
        "install the 'nvidia' extra",
    )
