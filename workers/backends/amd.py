"""AMD GPUs: a ROCm build of torch, which answers under the name torch.cuda. Not yet run on a device by us."""

import re
from typing import Any

import torch

from cluster import catalogue
from workers.backends.parts.torch_module import CudaModuleBackend
from workers.backends.parts.traits import Traits


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
        """`AMD Instinct MI300X OAM` -> `MI300X`; the architecture where the name has no such word."""
        name = str(self._properties().name)
        word = re.search(r"\bMI\d+[A-Z]*\b", name)
        known = catalogue.match_device("amd", name=name) or (word and catalogue.match_device("amd", name=word[0]))
        return known.kind.partition(":")[2] if known else self._architecture()

    def _has_units(self, dtype: torch.dtype) -> bool | None:
        return catalogue.has_native_dtype("amd", self._architecture(), str(dtype))


Backend = AMDBackend
