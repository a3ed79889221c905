"""Intel GPUs through torch.xpu. Not yet run on a device by us."""

from typing import Any

import torch

from workers.backends.parts.torch_module import TorchModuleBackend


class IntelBackend(TorchModuleBackend):
    BACKEND_NAME = "intel"

    @classmethod
    def unavailable_reason(cls) -> str:
        if not torch.xpu._is_compiled():
            return f"torch {torch.__version__} is built without XPU"
        if not torch.xpu.is_available():
            return (
                f"torch {torch.__version__} sees no Intel GPU; check the Level-Zero driver and the rights on /dev/dri"
            )
        return ""

    @property
    def collective_backend(self) -> str:
        return "xccl"

    def _properties(self) -> Any:
        return torch.xpu.get_device_properties(self.device)

    def _info(self) -> dict[str, Any]:
        return super()._info() | {"driver_version": str(self._properties().driver_version)}

    def _is_native(self, dtype: torch.dtype) -> bool:
        if dtype in (torch.float64, torch.complex128):
            return bool(self._properties().has_fp64)
        return not str(dtype).startswith("torch.float8")


Backend = IntelBackend
