"""The GPU of an Apple-silicon Mac, through torch.mps. Not yet run on a device by us."""

import platform
from typing import Any

import torch

from cluster import catalogue
from workers.devices.backends.base import BaseBackend, Later, Memory


class AppleBackend(BaseBackend):
    BACKEND_NAME = "apple"

    @classmethod
    def unavailable_reason(cls) -> str:
        if not torch.backends.mps.is_built():
            return f"torch {torch.__version__} is built without MPS"
        if not torch.backends.mps.is_available():
            return f"torch {torch.__version__} sees no Apple GPU; MPS needs Apple silicon and macOS 14 or newer"
        return ""

    @classmethod
    def count_devices(cls) -> int:
        return torch.mps.device_count()

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def empty_cache(self) -> None:
        torch.mps.empty_cache()

    def get_memory_stats(self) -> Memory:
        """Memory shared with the host; the total is the maximum that Metal recommends. Metal reports no peak."""
        total, reserved = torch.mps.recommended_max_memory(), torch.mps.driver_allocated_memory()
        return {
            "allocated_bytes": torch.mps.current_allocated_memory(),
            "reserved_bytes": reserved,
            "peak_bytes": None,
            "free_bytes": max(total - reserved, 0),
            "total_bytes": total,
        }

    @property
    def collective_backend(self) -> str:
        return "gloo"

    def _info(self) -> dict[str, Any]:
        return {"device_name": "Apple GPU", "architecture": platform.machine(), "unified_memory": True}

    def _configure(self, later: Later) -> None:
        fraction = getattr(self.config, "memory_fraction", None)
        if fraction is not None:
            later(torch.mps.set_per_process_memory_fraction, 1.0)
            torch.mps.set_per_process_memory_fraction(fraction)

    def _device_rng(self) -> torch.Tensor:
        return torch.mps.get_rng_state()

    def _set_device_rng(self, state: torch.Tensor) -> None:
        torch.mps.set_rng_state(state.cpu())

    def _has_units(self, dtype: torch.dtype) -> bool | None:
        return catalogue.has_native_dtype("apple", "", str(dtype))


Backend = AppleBackend
