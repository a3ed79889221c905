"""DeviceInfo of a device that this process uses: what torch tells, with the dtypes that were tried out."""

from typing import TYPE_CHECKING

import torch

from cluster.vocabulary import Scalar
from workers.backends.parts.precision import name_of
from workers.device_info import DeviceInfo

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend


def device_info(backend: "BaseBackend") -> DeviceInfo:
    memory, told = backend.get_memory_stats(), backend._info()
    own = {key: value for key, value in told.items() if key in DeviceInfo.model_fields}
    common: dict[str, Scalar] = {
        "collective_backend": backend.collective_backend,
        "shared_memory_per_block_bytes": backend.max_shared_memory_bytes(),
    }
    return DeviceInfo.model_validate(
        {
            "backend": backend.BACKEND_NAME,
            "device_type": str(backend.device),
            "device_id": backend.device_id,
            "device_name": backend.BACKEND_NAME,
            "kind": backend.BACKEND_NAME,
            "total_memory_bytes": memory["total_bytes"],
            "free_memory_bytes": memory["free_bytes"],
            "supported_dtypes": tuple(sorted(name_of(d) for d in backend.supported_dtypes())),
            "dtypes_from": "probed",
            "emulated": backend.emulated,
        }
        | own
        | {
            "runtime_versions": {"torch": str(torch.__version__)} | own.get("runtime_versions", {}),
            "properties": common | {key: value for key, value in told.items() if key not in own},
        }
    )
