"""AMD GPUs, through a ROCm build of torch, whose API is torch.cuda. Not yet run on an AMD device by us."""

import re
from typing import Any

import torch

from cluster import catalogue
from workers.devices.backends.device_facts import Traits
from workers.devices.backends.torch_module import CudaModuleBackend


class AMDBackend(CudaModuleBackend):
    BACKEND_NAME = "amd"
    traits = Traits(channels_last=())  # MIOpen's default layout is contiguous; not measured to be faster

    @classmethod
    def unavailable_reason(cls) -> str:
        if torch.version.hip is None:
            return f"torch {torch.__version__} is not a ROCm build"
        if not torch.cuda.is_available():
            return (
                f"torch {torch.__version__} (ROCm {torch.version.hip}) sees no AMD device; check the rights on /dev/kfd"
            )
        return ""

    @property
    def collective_backend(self) -> str:
        return "nccl"  # RCCL registers under this name

    def _architecture(self) -> str:
        return str(self._properties().gcnArchName).split(":")[0]

    def _info(self) -> dict[str, Any]:
        return super()._info() | {
            "kind": f"amd:{self._model()}",
            "architecture": self._architecture(),
            "runtime_versions": {"rocm": str(torch.version.hip)},
        }

    def _model(self) -> str:
        """Model from the device name: `AMD Instinct MI300X OAM` -> `MI300X`; else the architecture."""
        name = str(self._properties().name)
        match = re.search(r"\bMI\d+[A-Z]*\b", name)
        row = catalogue.match_device("amd", name=name) or (match and catalogue.match_device("amd", name=match[0]))
        return row.kind.partition(":")[2] if row else self._architecture()

    def _has_units(self, dtype: torch.dtype) -> bool | None:
        return catalogue.has_native_dtype("amd", self._architecture(), str(dtype))


Backend = AMDBackend
