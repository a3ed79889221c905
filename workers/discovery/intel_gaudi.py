"""Intel Gaudi through its own tool, hl-smi. Counted and described; no back end of ours computes on it yet."""

from cluster import catalogue
from cluster.vocabulary import Device, Finding
from workers.discovery.machine import Machine, sysfs_address, tool_output

HABANA = 0x1DA3
FIELDS = ("index", "uuid", "bus_id", "name", "memory.total", "memory.free", "driver_version")
COMMAND = ["hl-smi", "--query-aip=" + ",".join(FIELDS), "--format=csv,noheader,nounits"]
BOARD = len("HL-225")
"""Of a name such as HL-225B: what follows is the form of the card."""


def find(machine: Machine, first: int) -> tuple[list[Device], list[Finding]]:
    """Devices numbered from `first` on."""
    cards = machine.pci(HABANA)
    if not cards:
        return [], []
    said, problem = tool_output(COMMAND, machine.environ)
    if problem:
        told = f"{len(cards)} Gaudi cards on the PCI bus, but {problem}"
        return [], [Finding("warning", "intel", told, "install Habana's driver and tools")]
    return devices(said, first), []


def devices(said: str, first: int) -> list[Device]:
    """`said` is a line of FIELDS per card; memory in MiB."""
    rows = [dict(zip(FIELDS, (v.strip() for v in line.split(",")), strict=True)) for line in said.splitlines() if line]
    return [_device(row, first) for row in rows]


def _device(row: dict[str, str], first: int) -> Device:
    known = catalogue.found("intel", name=row["name"]) or catalogue.found("intel", name=row["name"][:BOARD])
    return Device(
        backend="intel",
        kind=known.kind if known else f"intel:{row['name']}",
        index=first + int(row["index"]),
        name=f"Intel Gaudi {row['name']}",
        uuid=row["uuid"],
        total_memory_bytes=int(row["memory.total"]) << 20,
        free_memory_bytes=int(row["memory.free"]) << 20,
        driver_version=row["driver_version"],
        architecture=known.architecture if known else "gaudi",
        unavailable_reason=known.unavailable if known else "this Gaudi is in no list of ours",
        pci_address=sysfs_address(row["bus_id"]),
    )
