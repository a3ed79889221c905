"""The CPU of a node, taken as one device. POLYFLEET_CPU_ENGINE=ipex puts Intel's extension in torch's place."""

import importlib
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workers.backends.base import BaseBackend, Memory
from workers.backends.parts.host_memory import process_memory
from workers.optimizers import passes

ENGINES = ("", "torch", "ipex")


class CPUBackend(BaseBackend):
    BACKEND_NAME = "cpu"

    @classmethod
    def unavailable_reason(cls) -> str:
        engine = _engine()
        if engine not in ENGINES:
            return f"POLYFLEET_CPU_ENGINE is {engine!r}, known are torch and ipex"
        if engine != "ipex":
            return ""
        try:
            importlib.import_module("intel_extension_for_pytorch")
        except (ImportError, OSError, RuntimeError) as e:
            return f"POLYFLEET_CPU_ENGINE=ipex, and intel_extension_for_pytorch does not load: {e}"
        return ""

    @classmethod
    def device_count(cls) -> int:
        return 1

    def memory_stats(self) -> Memory:
        return process_memory()

    @property
    def collective_backend(self) -> str:
        return "gloo"

    def _device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def _info(self) -> dict[str, Any]:
        more = {"name": _model_name(), "engine": _engine() or "torch", "threads": torch.get_num_threads()}
        return more | {"capability": torch.backends.cpu.get_cpu_capability()}

    def _enter(self, later: Any) -> None:
        later(torch.set_num_threads, torch.get_num_threads())

    def _channels_last_refusal(self, dtype: torch.dtype) -> str:
        onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return "" if onednn else "this torch has no oneDNN"

    def _compile(self, model: nn.Module, work: passes.Work) -> nn.Module:
        if _engine() != "ipex":
            return super()._compile(model, work)
        if work.training:
            raise passes.Skip("IPEX repacks weights for training in a layout that checkpoints cannot carry")
        work.details["compile"] = "IPEX operators"
        ipex = importlib.import_module("intel_extension_for_pytorch")
        if isinstance(model, passes.Autocast):
            return passes.Autocast(ipex.optimize(model.inner, dtype=work.dtype, inplace=False), self, work.dtype)
        optimised: nn.Module = ipex.optimize(model, inplace=False)
        return optimised


Backend = CPUBackend


def _engine() -> str:
    return os.environ.get("POLYFLEET_CPU_ENGINE", "").lower()


def _model_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
