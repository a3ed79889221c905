"""Google TPUs through torch-xla, and XLA on the CPU (PJRT_DEVICE=CPU): the same compiler and lazy tensors, emulated.

Nothing runs until the graph is cut. While the backend is entered, every optimizer's step cuts it, so that a plain torch
loop works unchanged. On a real TPU this file has not been run by us.
"""

import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from workers.backends.base import BaseBackend, Memory
from workers.backends.parts.host_memory import process_memory
from workers.optimizers import passes

DEVICE_FILES = ("accel*", "vfio/[0-9]*")
# Stored on a TPU, but without units that compute with them. Source: Google's TPU system architecture and the XLA dtype
# table.
NOT_NATIVE = (torch.float16, torch.float64, torch.complex128)


class TPUBackend(BaseBackend):
    BACKEND_NAME = "tpu"

    def __init__(self, index: int = 0):
        self.emulated = _emulated()
        super().__init__(index)

    @classmethod
    def unavailable_reason(cls) -> str:
        if not _emulated() and not any(True for pattern in DEVICE_FILES for _ in Path("/dev").glob(pattern)):
            return "this node has no TPU device files, and PJRT_DEVICE is not CPU"
        try:
            importlib.import_module("torch_xla")
        except (ImportError, OSError, RuntimeError) as e:
            return f"torch-xla does not load beside torch {torch.__version__}: {e}"
        return ""

    @classmethod
    def device_count(cls) -> int:
        """Opens the device: a TPU then belongs to this process."""
        return int(_xla().device_count())

    def synchronize(self) -> None:
        _xla().sync()
        _xla_model().wait_device_ops()

    def step_boundary(self) -> None:
        _xla().sync()

    def memory_stats(self) -> Memory:
        """Of the process where the CPU emulates: its runtime counts nothing."""
        if self.emulated:
            return process_memory()
        told = _xla_model().get_memory_info(self.device)
        used, total = int(told["bytes_used"]), int(told["bytes_limit"])
        return {
            "allocated_bytes": used,
            "reserved_bytes": None,
            "peak_bytes": told.get("peak_bytes_used"),
            "free_bytes": total - used,
            "total_bytes": total,
        }

    @property
    def collective_backend(self) -> str:
        return "gloo" if self.emulated else "xla"  # on XLA's CPU runtime the xla group silently does nothing

    def init_group(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        if self.emulated:
            super().init_group(store, rank, world_size, timeout)
            return
        importlib.import_module("torch_xla.distributed.xla_backend")
        dist.init_process_group("xla", init_method="xla://", timeout=timeout)

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """Emulated: torch's own wrapper, gradients averaged through the host; buffers are sent round once, at first."""
        if not self.emulated:
            _xla_model().broadcast_master_param(model)
            return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        _broadcast_from_host(model)
        wrapped = nn.parallel.DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
        wrapped.register_comm_hook(None, _average_on_host)
        return wrapped

    def _device(self, index: int) -> torch.device:
        device: torch.device = _xla().device(index)
        return device

    def _info(self) -> dict[str, Any]:
        xla = _xla()
        versions = {"torch": str(torch.__version__), "torch_xla": str(xla.__version__)}
        return {"name": "XLA on the CPU" if self.emulated else "TPU", "versions": versions}

    def _enter(self, later: Callable[..., Any]) -> None:
        later(register_optimizer_step_post_hook(lambda *_: self.step_boundary()).remove)

    @property
    def rng_type(self) -> str:
        return "xla:emulated" if self.emulated else "xla"

    def _seed_device(self, number: int) -> None:
        _xla().manual_seed(number)

    def _device_rng(self) -> int:
        return int(_xla_model().get_rng_state())

    def _set_device_rng(self, state: int) -> None:
        _xla_model().set_rng_state(int(state))

    def _is_native(self, dtype: torch.dtype) -> bool:
        return self.emulated or dtype not in NOT_NATIVE

    def _channels_last_refusal(self, dtype: torch.dtype) -> str:
        return "XLA chooses layouts itself"

    def _compile(self, model: nn.Module, work: passes.Work) -> nn.Module:
        work.details["compile"] = "XLA's own, inherent: each new graph is compiled when it first runs"
        return model

    def _fit_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update({key: False for key in ("fused", "foreach") if group.get(key)})


Backend = TPUBackend


def _emulated() -> bool:
    return os.environ.get("PJRT_DEVICE", "").upper() == "CPU"


def _xla() -> Any:
    return importlib.import_module("torch_xla")


def _xla_model() -> Any:
    return importlib.import_module("torch_xla.core.xla_model")


def _broadcast_from_host(model: nn.Module) -> None:
    """Every rank starts from rank 0's parameters and buffers."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            host = tensor.detach().cpu()
            dist.broadcast(host, src=0)
            tensor.copy_(host)
    _xla().sync()


def _average_on_host(
    _: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """A hook of DistributedDataParallel, which insists on these very annotations."""
    flat = bucket.buffer()
    host = flat.cpu()
    dist.all_reduce(host)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result((host / dist.get_world_size()).to(flat.device))
    return done
