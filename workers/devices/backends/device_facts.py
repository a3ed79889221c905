"""Facts about the device of a back end, as functions. Users read them as attributes: see user_methods.py.

Traits are what the preparation of models needs to know, as data: backends contain no code about models.
"""

import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from workers.devices.backends.user_methods import overridable
from workers.devices.capability.device_info import DeviceInfo

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend


@dataclass(frozen=True, slots=True)
class Traits:
    """Capabilities that decide how a model is prepared.

    compiler          `backend` argument of torch.compile, `ipex` for IPEX's operators, or "" for none
    channels_last     precisions in which convolutions may be faster in the channels_last memory format
    fused_optimizers  torch's fused and foreach optimizer steps run on this device
    graph_captures    a lazy device compiles each step's graph anyway, so training needs no torch.compile
    autotunes         the compiler has a mode that searches for the fastest kernels
    """

    compiler: str = "inductor"
    channels_last: tuple[str, ...] = ("float32", "bfloat16", "float16")
    fused_optimizers: bool = True
    graph_captures: bool = False
    autotunes: bool = True


@overridable
def is_available(backend: "BaseBackend") -> bool:
    return not backend.unavailable_reason()


@overridable
def device_count(backend: "BaseBackend") -> int:
    return backend.count_devices()


@overridable
def kind(backend: "BaseBackend") -> str:
    """Kind of the device, as in discovery: `nvidia:H100-80GB`, `tpu:v5e`, `cpu`."""
    return str(backend._info().get("kind", backend.BACKEND_NAME))


@overridable
def device_name(backend: "BaseBackend") -> str:
    return backend.get_device_info().device_name


@overridable
def precision(backend: "BaseBackend") -> str:
    """Default precision: that of the configuration, else float32."""
    return backend.config.precision


@overridable
def get_all_devices(backend: "BaseBackend") -> list[DeviceInfo]:
    return [backend.get_device_info(number) for number in range(device_count(backend))]


@overridable
def max_memory_bytes(backend: "BaseBackend") -> int | None:
    """Maximum device memory for this process: all of it, or the configured `memory_fraction`."""
    total, fraction = backend.get_memory_stats()["total_bytes"], getattr(backend.config, "memory_fraction", None)
    return total if total is None or fraction is None else int(total * fraction)


@overridable
def max_shared_memory_bytes(backend: "BaseBackend") -> int | None:
    """On-chip memory that a block of threads can share; None if the device has none, or it is unknown."""
    size_bytes = backend._info().get("shared_memory_per_block_bytes")
    return None if size_bytes is None else int(size_bytes)


def process_memory() -> dict[str, int | None]:
    """Memory of a device that uses the host's: resident bytes of this process, free and total bytes of the machine."""
    machine, resident = psutil.virtual_memory(), psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "allocated_bytes": resident,
        "reserved_bytes": resident,
        "peak_bytes": max(peak, resident),
        "free_bytes": machine.available,
        "total_bytes": machine.total,
    }
