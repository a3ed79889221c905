"""The first wanted back end that has room: free memory is read without opening a device wherever somebody tells it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cluster.errors import UserError
from workers import backends
from workers.config import Given, PolyfleetConfig, config_of
from workers.config_values import short_repr
from workers.device_info import DeviceInfo
from workers.errors import NotEnoughMemory
from workers.selection import argument_checks, device_preference, factory
from workers.selection.backend_type import BackendType

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend


class Estimate(Protocol):
    """What workers.estimate_memory returns."""

    @property
    def total_bytes(self) -> int: ...


def create_with_memory_check(
    preference: "Sequence[str | BackendType] | str",
    bytes_needed: "int | Estimate",
    config: Given = None,
    **given: Any,
) -> "BaseBackend":
    """The first of `preference` (names, aliases or `auto`) with a device that has so much memory free, on that device.

    Raises NotEnoughMemory listing every device with what is free and what is missing, or why it cannot be used;
    UserError for a word that is no back end or a size that is none.
    """
    needed = _size(bytes_needed)
    wanted, settings = argument_checks.check_backend_names("preference", preference), config_of(config)
    if not wanted:
        raise UserError("preference names no back end", "name one, or 'auto'")
    found, looked = factory.detected_devices(), list[str]()
    for name in _names(wanted, found, settings):
        if reason := backends.unavailable_reason(name):
            looked.append(f"{name}: {reason}")
            continue
        for device in (d for d in found if d.backend == name):
            free = _free_bytes(device, settings)
            if free is not None and free >= needed:
                return backends.load(name)(settings, **(given | {"device_id": factory.number(device)}))
            looked.append(_told(device, free, needed))
    raise NotEnoughMemory(needed, tuple(looked))


def _size(bytes_needed: "int | Estimate") -> int:
    size = getattr(bytes_needed, "total_bytes", bytes_needed)
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**63:
        raise UserError(
            f"{short_repr(bytes_needed)} is no size in bytes", "give a whole number, or what estimate_memory returns"
        )
    return size


def _names(wanted: Sequence[str], found: list[DeviceInfo], config: PolyfleetConfig) -> list[str]:
    best_first = [d.backend for d in device_preference.ranked(found, config.priority) if d.backend in config.backends]
    names = [n for word in wanted for n in (best_first if word == argument_checks.AUTO else [word])]
    return list(dict.fromkeys(names))


def _free_bytes(device: DeviceInfo, config: PolyfleetConfig) -> int | None:
    if device.free_memory_bytes is not None or device.unavailable_reason:
        return None if device.unavailable_reason else device.free_memory_bytes
    return backends.load(device.backend)(config, device_id=factory.number(device)).get_memory_stats()["free_bytes"]


def _told(device: DeviceInfo, free: int | None, needed: int) -> str:
    called = f"{device.device_type} ({device.device_name})"
    if device.unavailable_reason:
        return f"{called}: {device.unavailable_reason}"
    if free is None:
        return f"{called}: free memory unknown"
    return f"{called}: {free / 2**30:.2f} GiB free, {(needed - free) / 2**30:.2f} missing"
