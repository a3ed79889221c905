"""Everything that runs on a node: discovery, back ends, optimisers, checkpoints, tasks and attempts.

The names below are imported on first use, so that `import workers` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.backends.amd import AMDBackend as AMDBackend
    from workers.backends.apple import AppleBackend as AppleBackend
    from workers.backends.base import BaseBackend as BaseBackend
    from workers.backends.cpu import CPUBackend as CPUBackend
    from workers.backends.intel import IntelBackend as IntelBackend
    from workers.backends.neuron import NeuronBackend as NeuronBackend
    from workers.backends.nvidia import NVIDIABackend as NVIDIABackend
    from workers.backends.tpu import TPUBackend as TPUBackend
    from workers.capability.matrix import Capabilities as Capabilities
    from workers.capability.matrix import capabilities as capabilities
    from workers.config import PolyfleetConfig as PolyfleetConfig
    from workers.device_info import DeviceInfo as DeviceInfo
    from workers.discovery.hardware import HardwareDetector as HardwareDetector
    from workers.discovery.hardware import HardwareProfile as HardwareProfile
    from workers.errors import BackendUnavailable as BackendUnavailable
    from workers.errors import OutOfDeviceMemory as OutOfDeviceMemory
    from workers.kernels.kernel_choice import init_kernels as init_kernels
    from workers.kernels.kernel_choice import list_kernels as list_kernels
    from workers.libraries.registry import get_library as get_library
    from workers.libraries.registry import list_libraries as list_libraries
    from workers.memory.estimate import MemoryEstimate as MemoryEstimate
    from workers.memory.estimate import estimate_memory as estimate_memory
    from workers.memory.transformer_shape import TransformerShape as TransformerShape
    from workers.optimization_levels import OptimizationLevel as OptimizationLevel
    from workers.optimizers.optimizer import get_available_strategies as get_available_strategies
    from workers.optimizers.optimizer import get_optimizer as get_optimizer
    from workers.optimizers.prepared_model import load_prepared as load_prepared
    from workers.optimizers.result import OptimizationResult as OptimizationResult
    from workers.optimizers.result import OptimizationStrategy as OptimizationStrategy
    from workers.selection.backend_type import BackendType as BackendType
    from workers.selection.factory import BackendFactory as BackendFactory
    from workers.selection.factory import detect_best_backend as detect_best_backend
    from workers.selection.factory import get_backend as get_backend
    from workers.selection.factory import get_backend_info as get_backend_info
    from workers.selection.factory import is_backend_available as is_backend_available
    from workers.selection.factory import list_available_backends as list_available_backends
    from workers.selection.memory_check import create_with_memory_check as create_with_memory_check
    from workers.selection.summary import print_backend_summary as print_backend_summary
    from workers.validation.report import ValidationReport as ValidationReport
    from workers.validation.validate import validate as validate

NAMES: dict[str, tuple[str, ...]] = {
    "backends.amd": ("AMDBackend",),
    "backends.apple": ("AppleBackend",),
    "backends.base": ("BaseBackend",),
    "backends.cpu": ("CPUBackend",),
    "backends.intel": ("IntelBackend",),
    "backends.neuron": ("NeuronBackend",),
    "backends.nvidia": ("NVIDIABackend",),
    "backends.tpu": ("TPUBackend",),
    "capability.matrix": ("Capabilities", "capabilities"),
    "config": ("PolyfleetConfig",),
    "device_info": ("DeviceInfo",),
    "discovery.hardware": ("HardwareDetector", "HardwareProfile"),
    "errors": ("BackendUnavailable", "OutOfDeviceMemory"),
    "memory.estimate": ("MemoryEstimate", "estimate_memory"),
    "memory.transformer_shape": ("TransformerShape",),
    "libraries.registry": ("get_library", "list_libraries"),
    "kernels.kernel_choice": ("init_kernels", "list_kernels"),
    "optimization_levels": ("OptimizationLevel",),
    "optimizers.optimizer": ("get_available_strategies", "get_optimizer"),
    "optimizers.prepared_model": ("load_prepared",),
    "optimizers.result": ("OptimizationResult", "OptimizationStrategy"),
    "selection.factory": (
        "BackendFactory",
        "detect_best_backend",
        "get_backend",
        "get_backend_info",
        "is_backend_available",
        "list_available_backends",
    ),
    "selection.memory_check": ("create_with_memory_check",),
    "selection.summary": ("print_backend_summary",),
    "selection.backend_type": ("BackendType",),
    "validation.report": ("ValidationReport",),
    "validation.validate": ("validate",),
}
_MODULE_OF = {name: module for module, names in NAMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'workers' has no attribute {name!r}")
    value = getattr(import_module(f"workers.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
