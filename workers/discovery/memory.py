"""How much memory a device has, by its driver, the catalogue or its machine, whose memory it may share."""

from dataclasses import dataclass

from cluster import catalogue
from workers.discovery import resource_limits
from workers.discovery.machine import Machine


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes are None where nobody knows them. `unified`: it is the machine's own memory."""

    total_bytes: int | None
    free_bytes: int | None
    unified: bool = False


def device_memory(
    kind: str, architecture: str, machine: Machine | None, total_bytes: int | None, free_bytes: int | None = None
) -> DeviceMemory:
    """`total_bytes` and `free_bytes` are the driver's, None or 0 where it tells none. Of unified memory a device has
    what is sold with it, at most what the machine lets this process use; what is free there is free for the device.
    """
    row = catalogue.model(kind) if "-MIG-" not in kind else None  # a slice has a part of the card's
    listed_bytes = row.memory_per_device_bytes if row else None
    if not catalogue.unified_memory(kind, architecture):
        return DeviceMemory(total_bytes or listed_bytes, free_bytes)
    host = host_memory(machine)
    total = total_bytes or min(filter(None, (listed_bytes, host.total_bytes)), default=None)
    free = free_bytes if host.free_bytes is None else min(host.free_bytes, total or host.free_bytes)
    return DeviceMemory(total, free, unified=True)


def host_memory(machine: Machine | None) -> DeviceMemory:
    """All that this process may use of the machine's."""
    total_bytes, free_bytes = resource_limits.memory(machine) if machine else (None, None)
    return DeviceMemory(total_bytes, free_bytes, unified=True)
