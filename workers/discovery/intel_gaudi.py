"""Intel Gaudi through its own tool, hl-smi. Counted and described; no back end of ours computes on it yet."""

from cluster.vocabulary import Device, Finding
from workers.discovery.machine import Machine, sysfs_address, tool_output

HABANA = 0x1DA3
FIELDS = ("index", "uuid", "bus_id", "name", "memory.total", "memory.free", "driver_version")
MODELS = {"HL-205": "Gaudi", "HL-225": "Gaudi2", "HL-325": "Gaudi3", "HL-335": "Gaudi3"}
COMMAND = ["hl-smi", "--query-aip=" + ",".join(FIELDS), "--format=csv,noheader,nounits"]
REASON = "Polyfleet has no back end for Gaudi: it needs Habana's own build of torch"


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
    return [
        Device(
            backend="intel",
            kind=f"intel:{next((m for n, m in MODELS.items() if row['name'].startswith(n)), row['name'])}",
            index=first + int(row["index"]),
            name=f"Intel Gaudi {row['name']}",
            uuid=row["uuid"],
            total_memory_bytes=int(row["memory.total"]) << 20,
            free_memory_bytes=int(row["memory.free"]) << 20,
            driver_version=row["driver_version"],
            architecture="gaudi",
            unavailable_reason=REASON,
            pci_address=sysfs_address(row["bus_id"]),
        )
        for row in rows
    ]
