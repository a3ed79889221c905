"""Everything that runs on a node: discovery, back ends, optimisers, checkpoints, tasks and attempts.

The names below are imported on first use, so that `import workers` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.devices.backends import BackendUnavailable as BackendUnavailable
    from workers.devices.backends.base import BaseBackend as BaseBackend
    from workers.devices.backends.vendors.amd import AMDBackend as AMDBackend
    from workers.devices.backends.vendors.apple import AppleBackend as AppleBackend
    from workers.devices.backends.vendors.cpu import CPUBackend as CPUBackend
    from workers.devices.backends.vendors.intel import IntelBackend as IntelBackend
    from workers.devices.backends.vendors.neuron import NeuronBackend as NeuronBackend
    from workers.devices.backends.vendors.nvidia import NVIDIABackend as NVIDIABackend
    from workers.devices.backends.vendors.tpu import TPUBackend as TPUBackend
    from workers.devices.capability.device_info import DeviceInfo as DeviceInfo
    from workers.devices.capability.hardware import HardwareDetector as HardwareDetector
    from workers.devices.capability.hardware import HardwareProfile as HardwareProfile
    from workers.devices.libraries.registry import get_library as get_library
    from workers.devices.libraries.registry import list_libraries as list_libraries
    from workers.devices.selection.argument_checks import BackendType as BackendType
    from workers.devices.selection.factory import BackendFactory as BackendFactory
    from workers.devices.selection.factory import detect_best_backend as detect_best_backend
    from workers.devices.selection.factory import get_backend as get_backend
    from workers.devices.selection.factory import get_backend_info as get_backend_info
    from workers.devices.selection.factory import is_backend_available as is_backend_available
    from workers.devices.selection.factory import list_available_backends as list_available_backends
    from workers.devices.selection.memory_check import create_with_memory_check as create_with_memory_check
    from workers.devices.selection.summary import print_backend_summary as print_backend_summary
    from workers.errors import OutOfDeviceMemory as OutOfDeviceMemory
    from workers.kernels.dispatch.kernel_choice import init_kernels as init_kernels
    from workers.kernels.dispatch.kernel_choice import list_kernels as list_kernels
    from workers.models.memory.estimate import MemoryEstimate as MemoryEstimate
    from workers.models.memory.estimate import estimate_memory as estimate_memory
    from workers.models.memory.transformer_shape import TransformerShape as TransformerShape
    from workers.models.optimizers.optimizer import get_available_strategies as get_available_strategies
    from workers.models.optimizers.optimizer import get_optimizer as get_optimizer
    from workers.models.optimizers.result import OptimizationResult as OptimizationResult
    from workers.models.optimizers.result import OptimizationStrategy as OptimizationStrategy
    from workers.models.validation.matrix import Capabilities as Capabilities
    from workers.models.validation.matrix import capabilities as capabilities
    from workers.models.validation.report import ValidationReport as ValidationReport
    from workers.models.validation.validate import validate as validate
    from workers.options.config import PolyfleetConfig as PolyfleetConfig
    from workers.options.optimization_levels import OptimizationLevel as OptimizationLevel
    from workers.tasks.prepared_model import load_prepared as load_prepared

NAMES: dict[str, tuple[str, ...]] = {
    "devices.backends.vendors.amd": ("AMDBackend",),
    "devices.backends.vendors.apple": ("AppleBackend",),
    "devices.backends": ("BackendUnavailable",),
    "devices.backends.base": ("BaseBackend",),
    "devices.backends.vendors.cpu": ("CPUBackend",),
    "devices.backends.vendors.intel": ("IntelBackend",),
    "devices.backends.vendors.neuron": ("NeuronBackend",),
    "devices.backends.vendors.nvidia": ("NVIDIABackend",),
    "devices.backends.vendors.tpu": ("TPUBackend",),
    "models.validation.matrix": ("Capabilities", "capabilities"),
    "options.config": ("PolyfleetConfig",),
    "devices.capability.device_info": ("DeviceInfo",),
    "devices.capability.hardware": ("HardwareDetector", "HardwareProfile"),
    "errors": ("OutOfDeviceMemory",),
    "models.memory.estimate": ("MemoryEstimate", "estimate_memory"),
    "models.memory.transformer_shape": ("TransformerShape",),
    "devices.libraries.registry": ("get_library", "list_libraries"),
    "kernels.dispatch.kernel_choice": ("init_kernels", "list_kernels"),
    "options.optimization_levels": ("OptimizationLevel",),
    "models.optimizers.optimizer": ("get_available_strategies", "get_optimizer"),
    "tasks.prepared_model": ("load_prepared",),
    "models.optimizers.result": ("OptimizationResult", "OptimizationStrategy"),
    "devices.selection.factory": (
        "BackendFactory",
        "detect_best_backend",
        "get_backend",
        "get_backend_info",
        "is_backend_available",
        "list_available_backends",
    ),
    "devices.selection.memory_check": ("create_with_memory_check",),
    "devices.selection.summary": ("print_backend_summary",),
    "devices.selection.argument_checks": ("BackendType",),
    "models.validation.report": ("ValidationReport",),
    "models.validation.validate": ("validate",),
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
