"""CPU backend: all CPUs of a node as one device.

The engine `ipex` uses Intel's extension instead of plain torch; it runs on Intel and AMD CPUs. The option cpu.engine or
POLYFLEET_CPU_ENGINE, which a pool of kind cpu:ipex sets, selects it.
"""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from cluster import catalogue
from cluster.errors import SpecError
from workers.devices.backends import BackendUnavailable, import_error, torch_settings
from workers.devices.backends.base import BaseBackend, Later, Memory
from workers.devices.backends.device_facts import Traits, process_memory
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.vendors.cpu import instruction_sets
from workers.options.config import CPUConfig

ENGINES = ("", "torch", "ipex")
IPEX = "intel_extension_for_pytorch"


class CPUBackend(BaseBackend):
    BACKEND_NAME = "cpu"

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        configured = self.config.engine if isinstance(self.config, CPUConfig) else None
        self.engine = configured or _configured_engine() or "torch"
        if reason := _engine_reason(self.engine):
            raise BackendUnavailable("cpu", reason)
        if self.engine == "ipex" and getattr(self.config, "compile_mode", "default") != "default":
            raise SpecError(
                "cpu.compile_mode",
                "it is a mode of torch.compile, and the engine is ipex",
                "unset it, or set cpu.engine to torch",
            )
        onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        layouts = Traits().channels_last if onednn else ()
        self.traits = Traits("ipex" if self.engine == "ipex" else "inductor", channels_last=layouts)

    @classmethod
    def unavailable_reason(cls) -> str:
        return _engine_reason(_configured_engine())

    @classmethod
    def count_devices(cls) -> int:
        return 1

    def get_memory_stats(self) -> Memory:
        return process_memory()

    @property
    def collective_backend(self) -> str:
        return "gloo"

    def _device(self, device_id: int) -> torch.device:
        return torch.device("cpu")

    def _info(self) -> dict[str, Any]:
        return {
            "kind": "cpu:ipex" if self.engine == "ipex" else "cpu",
            "device_name": _model_name(),
            "architecture": platform.machine(),
            "unified_memory": True,
            "engine": self.engine,
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }

    def _enter(self, later: Later) -> None:
        later(torch.set_num_threads, torch.get_num_threads())

    def _configure(self, later: Later) -> None:
        config: Any = self.config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.float32_matmul is not None:
            later(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision(config.float32_matmul)
        torch_settings.attention(config.attention, later, self.device)

    def _has_units(self, dtype: torch.dtype) -> bool | None:
        """Return False if the CPU has no instruction set for the dtype, else None: only its speed shows whether it is
        used, because ATEN_CPU_CAPABILITY or ONEDNN_MAX_CPU_ISA may keep torch or oneDNN from it.
        """
        sets = catalogue.instruction_sets(str(dtype))
        flags = instruction_sets(Machine())
        return None if not sets or not flags or any(flags.get(name) for name in sets) else False


Backend = CPUBackend


def _configured_engine() -> str:
    return os.environ.get("POLYFLEET_CPU_ENGINE", "").lower()


def _engine_reason(engine: str) -> str:
    if engine not in ENGINES:
        return f"POLYFLEET_CPU_ENGINE is {engine!r}; choose torch or ipex"
    reason = import_error(IPEX) if engine == "ipex" else ""
    return f"the engine ipex was requested, but {reason}" if reason else ""


def _model_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
