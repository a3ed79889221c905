"""Memory of a device, from its driver, the catalogue or the machine, whose memory it may share."""

from dataclasses import dataclass

from cluster import catalogue
from workers.devices.discovery import resource_limits
from workers.devices.discovery.machine import Machine


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Sizes in bytes, None if unknown. `unified`: the device uses the machine's memory."""

    total_bytes: int | None
    free_bytes: int | None
    unified: bool = False


def device_memory(
    kind: str, architecture: str, machine: Machine | None, total_bytes: int | None, free_bytes: int | None = None
) -> DeviceMemory:
    """Determine a device's memory. `total_bytes` and `free_bytes` are the driver's, None or 0 if it reports none.

    With unified memory the total is the catalogue's size, limited to what this process may use of the machine, and
    the machine's free memory is free for the device.
    """
    row = catalogue.model(kind) if "-MIG-" not in kind else None  # a slice has only part of the card's memory
    listed_bytes = row.memory_per_device_bytes if row else None
    if not catalogue.unified_memory(kind, architecture):
        return DeviceMemory(total_bytes or listed_bytes, free_bytes)
    host = host_memory(machine)
    total = total_bytes or min(filter(None, (listed_bytes, host.total_bytes)), default=None)
    free = free_bytes if host.free_bytes is None else min(host.free_bytes, total or host.free_bytes)
    return DeviceMemory(total, free, unified=True)


def host_memory(machine: Machine | None) -> DeviceMemory:
    """Memory of the machine that this process may use."""
    total_bytes, free_bytes = resource_limits.memory(machine) if machine else (None, None)
    return DeviceMemory(total_bytes, free_bytes, unified=True)
