"""Name a module's tensors by walking its tree past wrappers, never by removing prefixes."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workers.checkpoint.format.dtypes import DTYPES, dtype_name
from workers.checkpoint.tensors.sharded import is_sharded
from workers.errors import CheckpointError

_TRANSPARENT = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper", "_checkpoint_wrapped_module"),
)
"""Wrappers without tensors of their own: module, class, attribute of the wrapped module. A class is looked up only if
it was already imported: without torch._dynamo (two seconds to import) there is no compiled module.
"""


@dataclass(frozen=True, slots=True)
class Slot:
    """One attribute of a module that is a tensor. Several slots with the same object are a tie."""

    name: str
    role: str
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self._table[self.key]
        return tensor

    def replace(self, tensor: torch.Tensor) -> None:
        self._table[self.key] = tensor

    @property
    def _table(self) -> dict[str, Any]:
        return self.owner._parameters if self.role == "parameter" else self.owner._buffers


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`, data parallelism and activation checkpointing."""
    for module_name, name, inner in _TRANSPARENT:
        wrapper = getattr(sys.modules.get(module_name), name, None)
        if wrapper is not None and isinstance(module, wrapper):
            return unwrap(getattr(module, inner))
    return module


def modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of the tree with its prefix ("" or "layers.0."); a module used twice comes twice."""
    module = unwrap(module)
    yield prefix, module
    for key, child in module._modules.items():
        if child is not None:
            yield from modules(child, f"{prefix}{key}.")


def slots(entry: str, module: nn.Module) -> list[Slot]:
    """List all parameters and persistent buffers, ties included, named `entry/…`.
    Raises CheckpointError for a module or tensor that cannot be saved completely.
    """
    candidates = []
    for prefix, owner in modules(module):
        if type(owner)._save_to_state_dict is not nn.Module._save_to_state_dict:
            raise CheckpointError(
                f"{entry}/{prefix.rstrip('.')} is a {type(owner).__name__}, which hides state of its own",
                "save that state as a separate entry of tensors and values",
            )
        persistent = [key for key in owner._buffers if key not in owner._non_persistent_buffers_set]
        candidates += [Slot(f"{entry}/{prefix}{key}", "parameter", owner, key) for key in owner._parameters]
        candidates += [Slot(f"{entry}/{prefix}{key}", "buffer", owner, key) for key in persistent]
    filled = [slot for slot in candidates if slot.tensor is not None]
    for slot in filled:
        check_plain(slot.name, slot.tensor)
    return filled


def extra_states(module: nn.Module) -> dict[str, nn.Module]:
    """Map prefixes to modules that define `get_extra_state`."""
    return {
        prefix: owner
        for prefix, owner in modules(module)
        if type(owner).get_extra_state is not nn.Module.get_extra_state
    }


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError for a tensor whose bytes are not all of it, such as a quantized one."""
    reason = ""
    if type(tensor) not in (torch.Tensor, nn.Parameter) and not is_sharded(tensor):
        reason = f"a {type(tensor).__name__} (quantized, wrapped or not yet initialized)"
    elif tensor.layout != torch.strided:
        reason = f"{str(tensor.layout).removeprefix('torch.')} (sparse)"
    elif tensor.is_quantized:
        reason = f"quantized ({tensor.dtype})"
    elif dtype_name(tensor.dtype) not in DTYPES:
        reason = f"of dtype {tensor.dtype}"
    elif tensor.is_meta:
        reason = "on the meta device, without data"
    if reason:
        raise CheckpointError(f"{name} is {reason}, which a checkpoint cannot hold", "save it as plain, dense tensors")
