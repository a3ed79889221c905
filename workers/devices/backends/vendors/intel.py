"""Intel GPUs, through torch.xpu. Older builds of torch get it from Intel's extension.

Not yet run on a device by us.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from workers.devices.backends import import_error
from workers.devices.backends.torch_module import TorchModuleBackend

IPEX = "intel_extension_for_pytorch"


class IntelBackend(TorchModuleBackend):
    BACKEND_NAME = "intel"

    @classmethod
    def unavailable_reason(cls) -> str:
        if not torch.xpu._is_compiled():
            extension = import_error(IPEX) if find_spec(IPEX) else f"{IPEX} is not installed"
            return f"torch {torch.__version__} is built without XPU" + (f", and {extension}" if extension else "")
        if not torch.xpu.is_available():
            return (
                f"torch {torch.__version__} sees no Intel GPU; check the Level-Zero driver and the rights on /dev/dri"
            )
        return ""

    @property
    def collective_backend(self) -> str:
        """`xccl` is built into newer torch; for older builds oneCCL's bindings provide `ccl`."""
        return "xccl" if getattr(dist, "is_xccl_available", lambda: False)() else "ccl"

    def _info(self) -> dict[str, Any]:
        properties = self._properties()
        return super()._info() | {
            "driver_version": str(properties.driver_version),
            "architecture": str(getattr(properties, "architecture", "")),
            "fp64": bool(properties.has_fp64),
            "shared_memory_per_block_bytes": getattr(properties, "local_mem_size", None),
        }

    def _has_units(self, dtype: torch.dtype) -> bool:
        if dtype in (torch.float64, torch.complex128):
            return bool(self._properties().has_fp64)
        return not str(dtype).startswith("torch.float8")


Backend = IntelBackend
