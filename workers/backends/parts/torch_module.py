"""What nvidia, amd and intel share: torch drives them through modules of one shape, torch.cuda and torch.xpu."""

from typing import Any

import torch
from torch import nn

from cluster.accelerators import TABLE
from workers.backends.base import BaseBackend, Memory


class TorchModuleBackend(BaseBackend):
    """A back end whose device type has a module in torch. A vendor adds why it is absent and what it can do."""

    @classmethod
    def _module(cls) -> Any:
        return torch.get_device_module(TABLE[cls.BACKEND_NAME].torch_device)

    @classmethod
    def device_count(cls) -> int:
        return int(cls._module().device_count())

    def synchronize(self) -> None:
        self._module().synchronize(self.device)

    def empty_cache(self) -> None:
        self._module().empty_cache()

    def memory_stats(self) -> Memory:
        module = self._module()
        free, total = module.mem_get_info(self.device)
        return {
            "allocated_bytes": module.memory_allocated(self.device),
            "reserved_bytes": module.memory_reserved(self.device),
            "peak_bytes": module.max_memory_allocated(self.device),
            "free_bytes": free,
            "total_bytes": total,
        }

    def data_parallel(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, device_ids=[self.index])

    def _info(self) -> dict[str, Any]:
        return {"name": self._module().get_device_name(self.device)}

    def _enter(self, later: Any) -> None:
        module = self._module()
        later(module.set_device, module.current_device())
        module.set_device(self.device)

    @property
    def rng_type(self) -> str:
        return self.BACKEND_NAME

    def _device_rng(self) -> torch.Tensor:
        state: torch.Tensor = self._module().get_rng_state(self.device)
        return state

    def _set_device_rng(self, state: torch.Tensor) -> None:
        self._module().set_rng_state(state.cpu(), self.device)
