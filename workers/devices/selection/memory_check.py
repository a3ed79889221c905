"""Create the first preferred backend that has enough free memory, read without opening the device where possible."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cluster.errors import UserError
from workers.devices import backends
from workers.devices.capability.device_info import DeviceInfo
from workers.devices.selection import argument_checks, factory
from workers.devices.selection.argument_checks import BackendType
from workers.errors import NotEnoughMemory
from workers.options import device_preference
from workers.options.config import ConfigLike, PolyfleetConfig, config_of
from workers.options.config_values import short_repr

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend


class Estimate(Protocol):
    """Result of workers.estimate_memory."""

    @property
    def total_bytes(self) -> int: ...


def create_with_memory_check(
    preference: "Sequence[str | BackendType] | str",
    bytes_needed: "int | Estimate",
    config: ConfigLike = None,
    **arguments: Any,
) -> "BaseBackend":
    """Create the first backend of `preference` (names, aliases or `auto`) on a device with enough free memory.

    Raises NotEnoughMemory listing for each device its free and missing memory, or why it cannot be used; UserError for
    an unknown backend or an invalid size.
    """
    needed = _size(bytes_needed)
    names, settings = argument_checks.check_backend_names("preference", preference), config_of(config)
    if not names:
        raise UserError("preference is empty", "give the name of a backend, or 'auto'")
    devices, rejected = factory.detected_devices(), list[str]()
    for name in _names(names, devices, settings):
        if reason := backends.unavailable_reason(name):
            rejected.append(f"{name}: {reason}")
            continue
        for device in (d for d in devices if d.backend == name):
            free = _free_bytes(device, settings)
            if free is not None and free >= needed:
                return backends.load(name)(settings, **(arguments | {"device_id": factory.torch_index(device)}))
            rejected.append(_rejection(device, free, needed))
    raise NotEnoughMemory(needed, tuple(rejected))


def _size(bytes_needed: "int | Estimate") -> int:
    size = getattr(bytes_needed, "total_bytes", bytes_needed)
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**63:
        raise UserError(
            f"{short_repr(bytes_needed)} is not a size in bytes",
            "give an integer of at least 0, or the result of estimate_memory",
        )
    return size


def _names(preference: Sequence[str], devices: list[DeviceInfo], config: PolyfleetConfig) -> list[str]:
    best_first = [d.backend for d in device_preference.ranked(devices, config.priority) if d.backend in config.backends]
    names = [n for entry in preference for n in (best_first if entry == argument_checks.AUTO else [entry])]
    return list(dict.fromkeys(names))


def _free_bytes(device: DeviceInfo, config: PolyfleetConfig) -> int | None:
    if device.free_memory_bytes is not None or device.unavailable_reason:
        return None if device.unavailable_reason else device.free_memory_bytes
    return backends.load(device.backend)(config, device_id=factory.torch_index(device)).get_memory_stats()["free_bytes"]


def _rejection(device: DeviceInfo, free: int | None, needed: int) -> str:
    label = f"{device.device_type} ({device.device_name})"
    if device.unavailable_reason:
        return f"{label}: {device.unavailable_reason}"
    if free is None:
        return f"{label}: free memory unknown"
    return f"{label}: {free / 2**30:.2f} GiB free, {(needed - free) / 2**30:.2f} missing"
