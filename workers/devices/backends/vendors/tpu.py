"""Google TPUs, through torch-xla or, if only that is installed, its successor torch_tpu.

With PJRT_DEVICE=CPU, XLA's compiler and lazy tensors run on the CPU (emulated). Not yet run on a real TPU by us.
"""

import importlib
import os
from datetime import timedelta
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cluster import catalogue
from cluster.errors import UserError
from workers.devices.backends import LOAD_ERRORS, import_error, torch_settings
from workers.devices.backends.base import Later, Memory
from workers.devices.backends.device_facts import process_memory
from workers.devices.backends.xla import TorchXLA, XLABackend

DEVICE_FILES = ("accel*", "vfio/[0-9]*")


class TorchTPU(TorchXLA):
    """Adapter to torch_tpu, whose device type `tpu` works with torch.accelerator; there is no graph to cut."""

    DEVICE_TYPE = "tpu"

    @staticmethod
    def load() -> str:
        """Load torch_tpu, which torch may not have done (TORCH_DEVICE_BACKEND_AUTOLOAD=0). Returns "" or the reason."""
        try:
            for entry in entry_points(group="torch.backends", name="torch_tpu"):
                entry.load()()
        except LOAD_ERRORS as e:
            return f"torch_tpu does not load with torch {torch.__version__}: {e}"
        return "" if torch.accelerator.is_available() else f"torch_tpu {version('torch_tpu')} sees no TPU"

    def count(self) -> int:
        return torch.accelerator.device_count()

    def device(self, number: int) -> torch.device:
        return torch.device(self.DEVICE_TYPE, number)

    def cut(self) -> None:
        """Do nothing: tensors of torch_tpu are not lazy."""

    def wait(self) -> None:
        torch.accelerator.synchronize()

    def memory(self, device: torch.device) -> Memory:
        accelerator: Any = torch.accelerator
        free, total = accelerator.get_memory_info(device)
        return {
            "allocated_bytes": accelerator.memory_allocated(device),
            "reserved_bytes": accelerator.memory_reserved(device),
            "peak_bytes": accelerator.max_memory_allocated(device),
            "free_bytes": free,
            "total_bytes": total,
        }

    def seed(self, number: int) -> None:
        """Do nothing: torch.manual_seed seeds torch_tpu's generator."""

    def rng(self, device: torch.device) -> Any:
        return torch.get_device_module(device).get_rng_state(device)

    def set_rng(self, state: Any, device: torch.device) -> None:
        torch.get_device_module(device).set_rng_state(state, device)

    def versions(self) -> dict[str, str]:
        return {"torch_tpu": version("torch_tpu")}


class TPUBackend(XLABackend):
    BACKEND_NAME = "tpu"

    def __init__(self, *arguments: Any, **options: Any):
        self.emulated = _is_emulated()
        super().__init__(*arguments, **options)
        if self.emulated and getattr(self.config, "topology", None):
            raise UserError(
                "tpu.topology is set, but XLA on the CPU has no topology", "unset tpu.topology, or PJRT_DEVICE=CPU"
            )

    @classmethod
    def unavailable_reason(cls) -> str:
        if not _is_emulated() and not any(True for pattern in DEVICE_FILES for _ in Path("/dev").glob(pattern)):
            return "this node has no TPU device files, and PJRT_DEVICE is not CPU"
        if find_spec("torch_xla") is None and find_spec("torch_tpu") is not None and not _is_emulated():
            cls.runtime = TorchTPU()
            return TorchTPU.load()
        return import_error("torch_xla")

    def get_memory_stats(self) -> Memory:
        """Memory of this process if the CPU emulates: XLA's CPU runtime does not count memory."""
        return process_memory() if self.emulated else super().get_memory_stats()

    @property
    def collective_backend(self) -> str:
        if self.emulated:
            return "gloo"  # on XLA's CPU runtime the xla group silently does nothing
        return "tpu_dist" if isinstance(self.runtime, TorchTPU) else "xla"

    def init_group(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        if self.collective_backend != "xla":
            super().init_group(store, rank, world_size, timeout)
            return
        importlib.import_module("torch_xla.distributed.xla_backend")
        dist.init_process_group("xla", init_method="xla://", timeout=timeout)

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """Wrap `model`. Emulated: average gradients on the host, and broadcast buffers once, at the start."""
        if self.collective_backend == "tpu_dist":
            return super().data_parallel(model)
        if not self.emulated:
            self.runtime.model().broadcast_master_param(model)
            return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        _broadcast_from_host(model, self.runtime)
        wrapped = nn.parallel.DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
        wrapped.register_comm_hook(None, _average_on_host)
        return wrapped

    def _rng_type(self) -> str:
        return "xla:emulated" if self.emulated else self.runtime.DEVICE_TYPE

    def _info(self) -> dict[str, Any]:
        name = "XLA on the CPU" if self.emulated else os.environ.get("TPU_ACCELERATOR_TYPE") or "TPU"
        kind = "tpu:emulated" if self.emulated else f"tpu:{_generation(name)}"
        return super()._info() | {"device_name": name, "kind": kind}

    def _configure(self, later: Later) -> None:
        config: Any = self.config
        if config.topology is not None:
            torch_settings.variable("TPU_CHIPS_PER_PROCESS_BOUNDS", config.topology, later)
        if isinstance(self.runtime, TorchTPU):
            return
        if config.persistent_cache is not None:
            _use_cache(config.persistent_cache)
        if config.matmul_precision is not None:
            backends = importlib.import_module("torch_xla.backends")
            later(backends.set_mat_mul_precision, backends.get_mat_mul_precision())
            backends.set_mat_mul_precision(config.matmul_precision)

    def _has_units(self, dtype: torch.dtype) -> bool | None:
        generation = _generation(os.environ.get("TPU_ACCELERATOR_TYPE", ""))
        return self.emulated or catalogue.has_native_dtype("tpu", generation, str(dtype))


Backend = TPUBackend


def _is_emulated() -> bool:
    return os.environ.get("PJRT_DEVICE", "").upper() == "CPU"


def _generation(accelerator_type: str) -> str:
    """Generation of an accelerator type: `v5litepod-8` -> `v5e`, `v6e-4` -> `v6e`."""
    first = accelerator_type.split("-")[0].lower()
    row = catalogue.match_device("tpu", name=first)
    return row.model if row else first


def _use_cache(folder: Path) -> None:
    """Set XLA's cache folder. XLA accepts it once per process, before its first program."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime = importlib.import_module("torch_xla.runtime")
    try:
        runtime.initialize_cache(str(folder), readonly=False)
    except AssertionError as e:
        raise UserError(
            f"tpu.persistent_cache cannot be set: {e}", "enter the backend before anything is computed on it"
        ) from None


def _broadcast_from_host(model: nn.Module, runtime: TorchXLA) -> None:
    """Copy rank 0's parameters and buffers to every rank."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            host = tensor.detach().cpu()
            dist.broadcast(host, src=0)
            tensor.copy_(host)
    runtime.cut()


def _average_on_host(
    _: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients on the host: a hook of DistributedDataParallel, which requires these annotations."""
    flat = bucket.buffer()
    host = flat.cpu()
    dist.all_reduce(host)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result((host / dist.get_world_size()).to(flat.device))
    return done
