"""NVIDIA GPUs, through torch.cuda."""

from typing import Any

import torch

from cluster import catalogue
from workers.devices.backends.device_facts import Traits
from workers.devices.backends.torch_module import CudaModuleBackend


class NVIDIABackend(CudaModuleBackend):
    BACKEND_NAME = "nvidia"
    traits = Traits(channels_last=("bfloat16", "float16"))  # channels_last is faster on tensor cores

    @classmethod
    def unavailable_reason(cls) -> str:
        if torch.version.hip is not None:
            return f"torch {torch.__version__} is a ROCm build"
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no device: update the driver"
        return ""

    @property
    def collective_backend(self) -> str:
        return "nccl"

    def _info(self) -> dict[str, Any]:
        from workers.devices.discovery.vendors.nvidia import model

        common, (major, minor) = super()._info(), torch.cuda.get_device_capability(self.device)
        return common | {
            "kind": f"nvidia:{model(common['device_name'], self._properties().total_memory)}",
            "compute_capability": f"{major}.{minor}",
            "architecture": f"sm_{major}{minor}",
            "runtime_versions": {"cuda": str(torch.version.cuda)},
        }

    def _has_units(self, dtype: torch.dtype) -> bool | None:
        major, minor = torch.cuda.get_device_capability(self.device)
        return catalogue.has_native_dtype("nvidia", f"sm_{major}{minor}", str(dtype))


Backend = NVIDIABackend
