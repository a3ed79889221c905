"""Intel Gaudi, through its tool hl-smi. Counted and described; no backend computes on it yet."""

from typing import Any

from cluster import catalogue
from cluster.types import Device, Finding
from workers.devices.discovery.card_reply import CardReply
from workers.devices.discovery.card_reply import findings as unread
from workers.devices.discovery.machine import Machine, PciDevice, sysfs_address, tool_output

HABANA = 0x1DA3
FIELDS = ("index", "uuid", "bus_id", "name", "memory.total", "memory.free", "driver_version")
COMMAND = ["hl-smi", "--query-aip=" + ",".join(FIELDS), "--format=csv,noheader,nounits"]
MAX_CARDS = 64
MODEL_LENGTH = len("HL-225")
"""Length of the model in a name such as HL-225B; the rest is the form factor."""


def find(machine: Machine, first: int) -> tuple[list[Device], list[Finding]]:
    """Return devices, numbered from `first`, and findings."""
    cards = machine.pci(HABANA)
    if not cards:
        return [], []
    output, problem = tool_output(COMMAND, machine.environ)
    if problem:
        message = f"{len(cards)} Gaudi cards on the PCI bus, but {problem}"
        replies = [CardReply("", "PCI", {"index": i, "bus_id": c.address, **_by_id(c)}) for i, c in enumerate(cards)]
        return devices(replies, first), [Finding("warning", "intel", message, "install Habana's driver and tools")]
    replies = parse_replies(output)
    return devices(replies, first), unread("intel", replies, "run hl-smi by hand; the driver may have lost the card")


def _by_id(card: PciDevice) -> dict[str, Any]:
    row = catalogue.match_device("intel", pci_id=f"{card.device:04x}")
    memory_bytes = row.memory_per_device_bytes if row else None
    return {
        "name": row.model if row else f"{card.device:#06x}",
        "memory.total": memory_bytes and memory_bytes >> 20,
    }


def parse_replies(output: str) -> list[CardReply]:
    """Parse hl-smi's output, a line of FIELDS per card."""
    replies = []
    for number, line in enumerate(filter(str.strip, output.splitlines())):
        values = [value.strip() for value in line.split(",")]
        fields = dict(zip(FIELDS, values, strict=True)) if len(values) == len(FIELDS) else line
        replies.append(CardReply(f"Gaudi card {number}", "hl-smi", fields))
    return replies


def devices(replies: list[CardReply], first: int) -> list[Device]:
    """Make devices of the replies, whose memory sizes are in MiB."""
    return [_device(reply, number, first) for number, reply in enumerate(replies)]


def _device(reply: CardReply, number: int, first: int) -> Device:
    """Make one device. A card with an unreadable line keeps its number."""
    name = reply.text("name", "Gaudi")
    row = catalogue.match_device("intel", name=name) or catalogue.match_device("intel", name=name[:MODEL_LENGTH])
    index = reply.number("index", at_most=MAX_CARDS)
    total_mib, free_mib = reply.number("memory.total"), reply.number("memory.free")
    kind = row.kind if row else f"intel:{name}"
    return Device(
        backend="intel",
        kind=kind,
        index=first + (number if index is None else index),
        name=f"Intel Gaudi {name}" if reply.text("name") else "Intel Gaudi",
        uuid=reply.text("uuid"),
        total_memory_bytes=total_mib << 20 if total_mib else None,
        free_memory_bytes=None if free_mib is None else free_mib << 20,
        driver_version=reply.text("driver_version"),
        architecture=row.architecture if row else "gaudi",
        unavailable_reason=row.unavailable if row else "Polyfleet's catalogue does not list this Gaudi model",
        pci_address=sysfs_address(reply.text("bus_id")),
    )
