"""Intel Gaudi through its own tool, hl-smi. Counted and described; no back end of ours computes on it yet."""

from typing import Any

from cluster import catalogue
from cluster.types import Device, Finding
from workers.discovery.card_reply import Answer
from workers.discovery.card_reply import findings as unread
from workers.discovery.machine import Machine, PciDevice, sysfs_address, tool_output

HABANA = 0x1DA3
FIELDS = ("index", "uuid", "bus_id", "name", "memory.total", "memory.free", "driver_version")
COMMAND = ["hl-smi", "--query-aip=" + ",".join(FIELDS), "--format=csv,noheader,nounits"]
MAX_CARDS = 64
BOARD = len("HL-225")
"""Of a name such as HL-225B: what follows is the form of the card."""


def find(machine: Machine, first: int) -> tuple[list[Device], list[Finding]]:
    """Devices numbered from `first` on."""
    cards = machine.pci(HABANA)
    if not cards:
        return [], []
    said, problem = tool_output(COMMAND, machine.environ)
    if problem:
        message = f"{len(cards)} Gaudi cards on the PCI bus, but {problem}"
        told = [Answer("", "PCI", {"index": i, "bus_id": c.address, **_by_id(c)}) for i, c in enumerate(cards)]
        return devices(told, first), [Finding("warning", "intel", message, "install Habana's driver and tools")]
    told = answers(said)
    return devices(told, first), unread("intel", told, "run hl-smi by hand; the driver may have lost the card")


def _by_id(card: PciDevice) -> dict[str, Any]:
    known = catalogue.match_device("intel", pci_id=f"{card.device:04x}")
    memory_bytes = known.memory_per_device_bytes if known else None
    return {
        "name": known.model if known else f"{card.device:#06x}",
        "memory.total": memory_bytes and memory_bytes >> 20,
    }


def answers(said: str) -> list[Answer]:
    """Of a line of FIELDS per card."""
    found = []
    for number, line in enumerate(filter(str.strip, said.splitlines())):
        values = [value.strip() for value in line.split(",")]
        fields = dict(zip(FIELDS, values, strict=True)) if len(values) == len(FIELDS) else line
        found.append(Answer(f"Gaudi card {number}", "hl-smi", fields))
    return found


def devices(told: list[Answer], first: int) -> list[Device]:
    """Memory is told in MiB."""
    return [_device(answer, number, first) for number, answer in enumerate(told)]


def _device(answer: Answer, number: int, first: int) -> Device:
    """A card whose line cannot be read keeps its place."""
    name = answer.text("name", "Gaudi")
    known = catalogue.match_device("intel", name=name) or catalogue.match_device("intel", name=name[:BOARD])
    index = answer.number("index", at_most=MAX_CARDS)
    total_mib, free_mib = answer.number("memory.total"), answer.number("memory.free")
    kind = known.kind if known else f"intel:{name}"
    return Device(
        backend="intel",
        kind=kind,
        index=first + (number if index is None else index),
        name=f"Intel Gaudi {name}" if answer.text("name") else "Intel Gaudi",
        uuid=answer.text("uuid"),
        total_memory_bytes=total_mib << 20 if total_mib else None,
        free_memory_bytes=None if free_mib is None else free_mib << 20,
        driver_version=answer.text("driver_version"),
        architecture=known.architecture if known else "gaudi",
        unavailable_reason=known.unavailable if known else "Polyfleet's catalogue does not list this Gaudi model",
        pci_address=sysfs_address(answer.text("bus_id")),
    )
