"""Memory of a device that is the host itself."""

import resource
import sys

import psutil


def process_memory() -> dict[str, int | None]:
    """Resident bytes of this process now and at their highest; free and total of the machine."""
    machine, mine = psutil.virtual_memory(), psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "allocated_bytes": mine,
        "reserved_bytes": mine,
        "peak_bytes": max(peak, mine),
        "free_bytes": machine.available,
        "total_bytes": machine.total,
    }
