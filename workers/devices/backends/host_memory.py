"""Memory statistics of a device that uses the host's memory."""

import resource
import sys

import psutil


def process_memory() -> dict[str, int | None]:
    """Return current and peak resident bytes of this process, and free and total bytes of the machine."""
    machine, resident = psutil.virtual_memory(), psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "allocated_bytes": resident,
        "reserved_bytes": resident,
        "peak_bytes": max(peak, resident),
        "free_bytes": machine.available,
        "total_bytes": machine.total,
    }
