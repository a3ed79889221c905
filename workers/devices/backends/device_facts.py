"""Facts about the device of a back end, as functions. Users read them as attributes: see user_methods.py."""

from typing import TYPE_CHECKING

from workers.devices.backends.user_methods import overridable
from workers.devices.capability.device_info import DeviceInfo

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend


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
