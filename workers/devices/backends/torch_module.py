"""Base classes of nvidia, amd and intel: torch.cuda and torch.xpu have the same API."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cluster import catalogue
from workers.devices.backends import torch_settings
from workers.devices.backends.base import BaseBackend, Later, Memory


class TorchModuleBackend(BaseBackend):
    """Backend whose device type has a module in torch. A vendor adds its availability check and capabilities."""

    @classmethod
    def _module(cls) -> Any:
        return torch.get_device_module(catalogue.vendor(cls.BACKEND_NAME).torch_device)

    @classmethod
    def count_devices(cls) -> int:
        return int(cls._module().device_count())

    def synchronize(self) -> None:
        self._module().synchronize(self.device)

    def empty_cache(self) -> None:
        self._module().empty_cache()

    def get_memory_stats(self) -> Memory:
        module = self._module()
        free, total = module.mem_get_info(self.device)
        return {
            "allocated_bytes": module.memory_allocated(self.device),
            "reserved_bytes": module.memory_reserved(self.device),
            "peak_bytes": module.max_memory_allocated(self.device),
            "free_bytes": free,
            "total_bytes": total,
        }

    def peak_of(self, call: Callable[[], object]) -> int | None:
        self.synchronize()
        self._module().reset_peak_memory_stats(self.device)
        call()
        self.synchronize()
        return int(self._module().max_memory_allocated(self.device))

    def data_parallel(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, device_ids=[self.device_id])

    def _properties(self) -> Any:
        return self._module().get_device_properties(self.device)

    def _info(self) -> dict[str, Any]:
        return {"device_name": self._module().get_device_name(self.device)}

    def _enter(self, later: Later) -> None:
        later(self._module().set_device, self._module().current_device())
        self._select()

    def _configure(self, later: Later) -> None:
        fraction = getattr(self.config, "memory_fraction", None)
        if fraction is not None:
            later(self._module().set_per_process_memory_fraction, 1.0, self.device)
            self._module().set_per_process_memory_fraction(fraction, self.device)

    def _select(self) -> None:
        self._module().set_device(self.device)

    def _rng_type(self) -> str:
        return self.BACKEND_NAME

    def _device_rng(self) -> torch.Tensor:
        state: torch.Tensor = self._module().get_rng_state(self.device)
        return state

    def _set_device_rng(self, state: torch.Tensor) -> None:
        self._module().set_rng_state(state.cpu(), self.device)


class CudaModuleBackend(TorchModuleBackend):
    """Backend on torch.cuda, which is CUDA in one build of torch and ROCm in another."""

    def _info(self) -> dict[str, Any]:
        properties = self._properties()
        return super()._info() | {
            "uuid": str(getattr(properties, "uuid", "")),
            "unified_memory": bool(getattr(properties, "is_integrated", False)),
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "shared_memory_per_block_bytes": getattr(properties, "shared_memory_per_block_optin", None)
            or getattr(properties, "shared_memory_per_block", None),
        }

    def _configure(self, later: Later) -> None:
        super()._configure(later)
        config: Any = self.config
        torch_settings.tf32(config.allow_tf32, later)
        torch_settings.attention(config.attention, later, self.device)
        if config.memory_growth is not None:
            later(_expandable_segments, False)
            _expandable_segments(config.memory_growth)


def _expandable_segments(on: bool) -> None:
    """Turn expandable segments on or off for memory reserved from now on. Torch's default is off."""
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{on}")
