"""Base class of tpu and neuron: lazy tensors of torch-xla. Nothing runs until the graph is cut.

While such a backend is entered, every optimizer step cuts the graph, so that a plain torch loop works unchanged.
"""

import importlib
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from workers.devices.backends.base import BaseBackend, Later, Memory
from workers.devices.backends.device_facts import Traits


class TorchXLA:
    """Adapter to torch-xla's functions, under the names that this package uses."""

    DEVICE_TYPE = "xla"

    @staticmethod
    def xla() -> Any:
        return importlib.import_module("torch_xla")

    @staticmethod
    def model() -> Any:
        return importlib.import_module("torch_xla.core.xla_model")

    def count(self) -> int:
        """Count devices. This opens the device, which then belongs to this process."""
        return int(self.xla().device_count())

    def device(self, number: int) -> torch.device:
        device: torch.device = self.xla().device(number)
        return device

    def cut(self) -> None:
        self.xla().sync()

    def wait(self) -> None:
        self.cut()
        self.model().wait_device_ops()

    def memory(self, device: torch.device) -> Memory:
        info = self.model().get_memory_info(device)
        used, total = int(info["bytes_used"]), int(info["bytes_limit"])
        peak = info.get("peak_bytes_used")
        return {
            "allocated_bytes": used,
            "reserved_bytes": None,
            "peak_bytes": None if peak is None else int(peak),
            "free_bytes": total - used,
            "total_bytes": total,
        }

    def seed(self, number: int) -> None:
        self.xla().manual_seed(number)

    def rng(self, device: torch.device) -> int:
        return int(self.model().get_rng_state())

    def set_rng(self, state: Any, device: torch.device) -> None:
        self.model().set_rng_state(int(state))

    def versions(self) -> dict[str, str]:
        return {"torch_xla": str(self.xla().__version__)}


class XLABackend(BaseBackend):
    """Backend with lazy tensors. `runtime` may be an adapter to another library with the methods of TorchXLA."""

    traits = Traits("openxla", channels_last=(), fused_optimizers=False, graph_captures=True, autotunes=False)
    runtime: TorchXLA = TorchXLA()

    @classmethod
    def count_devices(cls) -> int:
        return cls.runtime.count()

    def synchronize(self) -> None:
        self.runtime.wait()

    def step_boundary(self) -> None:
        self.runtime.cut()

    def get_memory_stats(self) -> Memory:
        return self.runtime.memory(self.device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate at once: lazy tensors get their memory only when the graph is cut, so cut it here."""
        buffer = super().allocate(nbytes).zero_()
        self.runtime.wait()
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        super().free(buffer)
        self.runtime.wait()

    def _device(self, device_id: int) -> torch.device:
        return self.runtime.device(device_id)

    def _enter(self, later: Later) -> None:
        later(register_optimizer_step_post_hook(lambda *_: self.step_boundary()).remove)

    def _seed_device(self, number: int) -> None:
        self.runtime.seed(number)

    def _device_rng(self) -> Any:
        return self.runtime.rng(self.device)

    def _set_device_rng(self, state: Any) -> None:
        self.runtime.set_rng(state, self.device)

    def _info(self) -> dict[str, Any]:
        return {"runtime_versions": self.runtime.versions()}
