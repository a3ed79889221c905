"""Build the DeviceInfo of a device that this process uses.

Most of it comes from torch. Its dtypes come from probes. Its driver, topology and properties come from discovery, which
does not open the device.
"""

from typing import TYPE_CHECKING, Any

import torch

from cluster.errors import UserError
from workers.devices.backends.device_facts import max_shared_memory_bytes
from workers.devices.backends.dtype_checks import supported_dtypes
from workers.devices.backends.precision import name_of
from workers.devices.capability.device_info import DeviceInfo

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend

DISCOVERED_FIELDS = ("uuid", "architecture", "driver_version", "pci_address", "numa_node", "tpu_version", "topology")
"""Fields filled from discovery if torch does not report them."""


def device_info(backend: "BaseBackend") -> DeviceInfo:
    memory, info = backend.get_memory_stats(), backend._info()
    own_fields = {
        key: value for key, value in info.items() if key in DeviceInfo.model_fields and value not in ("", None)
    }
    discovered = _discovered(backend, str(own_fields.get("uuid", "")))
    from_discovery = {name: getattr(discovered, name) for name in DISCOVERED_FIELDS} if discovered else {}
    native = tuple(sorted(name_of(dtype) for dtype in supported_dtypes(backend)))
    return DeviceInfo.model_validate(
        {
            "backend": backend.BACKEND_NAME,
            "device_type": str(backend.device),
            "device_id": backend.device_id,
            "device_name": backend.BACKEND_NAME,
            "kind": backend.BACKEND_NAME,
            "total_memory_bytes": memory["total_bytes"],
            "free_memory_bytes": memory["free_bytes"],
            "supported_dtypes": native,
            "dtypes_from": "probed",
            "fp8_supported": any(name.startswith("float8") for name in native),
            "emulated": backend.emulated,
        }
        | from_discovery
        | own_fields
        | {
            "runtime_versions": {"torch": str(torch.__version__)} | own_fields.get("runtime_versions", {}),
            "properties": (discovered.properties if discovered else {})
            | _properties(backend, info, own_fields, native),
        }
    )


def _properties(
    backend: "BaseBackend", info: dict[str, Any], own_fields: dict[str, Any], native: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "collective_backend": backend.collective_backend,
        "shared_memory_per_block_bytes": max_shared_memory_bytes(backend),
        "fp8_supported": any(name.startswith("float8") for name in native),
        **{key: value for key, value in info.items() if key not in own_fields and key not in DeviceInfo.model_fields},
    }


def _discovered(backend: "BaseBackend", uuid: str) -> DeviceInfo | None:
    """Find the same device in discovery by UUID, else by torch's number. Cached per backend object and device."""
    cached = backend.__dict__.setdefault("_found", {})
    if backend.device_id not in cached:
        cached[backend.device_id] = next(iter(_matching_devices(backend, uuid)), None)
    return cached[backend.device_id]  # type: ignore[no-any-return]


def _matching_devices(backend: "BaseBackend", uuid: str) -> list[DeviceInfo]:
    from workers.devices.capability.hardware import device_infos
    from workers.devices.discovery import discover

    try:
        devices, _ = discover(backend.BACKEND_NAME)
    except UserError:  # discovery has no module for this vendor
        return []
    infos = [info for info in device_infos(devices) if info.is_available]
    by_uuid = [info for info in infos if uuid and uuid in info.uuid]
    return by_uuid or infos[backend.device_id : backend.device_id + 1]
