"""Names of a module's tensors, found by walking the module tree past wrappers, never by taking prefixes off strings."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workers.checkpoint.format.dtypes import DTYPES, dtype_name
from workers.checkpoint.state.sharded import is_sharded
from workers.errors import CheckpointError

_TRANSPARENT = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper", "_checkpoint_wrapped_module"),
)
"""Wrappers that add nothing of their own: module, class, where the wrapped one is. Looked up only if already imported:
without torch._dynamo (two seconds to import) there is no compiled module."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One place of a module that holds a tensor. Several slots that hold the same object are a tie."""

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


def unwrapped(module: nn.Module) -> nn.Module:
    """What `torch.compile`, data parallelism and activation checkpointing wrapped."""
    for where, name, inner in _TRANSPARENT:
        wrapper = getattr(sys.modules.get(where), name, None)
        if wrapper is not None and isinstance(module, wrapper):
            return unwrapped(getattr(module, inner))
    return module


def modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module of the tree with its prefix ("" or "layers.0."); one used twice comes twice."""
    module = unwrapped(module)
    yield prefix, module
    for key, child in module._modules.items():
        if child is not None:
            yield from modules(child, f"{prefix}{key}.")


def slots(entry: str, module: nn.Module) -> list[Slot]:
    """All parameters and persistent buffers, ties included, named `entry/…`. Raises for what cannot be saved whole."""
    found = []
    for prefix, owner in modules(module):
        if type(owner)._save_to_state_dict is not nn.Module._save_to_state_dict:
            raise CheckpointError(
                f"{entry}/{prefix.rstrip('.')} is a {type(owner).__name__}, which hides state of its own",
                "save what it needs as an entry of tensors and values",
            )
        persistent = [key for key in owner._buffers if key not in owner._non_persistent_buffers_set]
        found += [Slot(f"{entry}/{prefix}{key}", "parameter", owner, key) for key in owner._parameters]
        found += [Slot(f"{entry}/{prefix}{key}", "buffer", owner, key) for key in persistent]
    held = [slot for slot in found if slot.tensor is not None]
    for slot in held:
        check_plain(slot.name, slot.tensor)
    return held


def extra_states(module: nn.Module) -> dict[str, nn.Module]:
    """Modules that define `get_extra_state`, by their prefix."""
    return {
        prefix: owner
        for prefix, owner in modules(module)
        if type(owner).get_extra_state is not nn.Module.get_extra_state
    }


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError for a tensor that is more than a block of numbers: its bytes would not be all of it."""
    why = ""
    if type(tensor) not in (torch.Tensor, nn.Parameter) and not is_sharded(tensor):
        why = f"a {type(tensor).__name__} (quantized, wrapped or not yet initialized)"
    elif tensor.layout != torch.strided:
        why = f"{str(tensor.layout).removeprefix('torch.')} (sparse)"
    elif tensor.is_quantized:
        why = f"quantized ({tensor.dtype})"
    elif dtype_name(tensor.dtype) not in DTYPES:
        why = f"of dtype {tensor.dtype}"
    elif tensor.is_meta:
        why = "on the meta device, without data"
    if why:
        raise CheckpointError(f"{name} is {why}, which a checkpoint cannot hold", "save it as plain, dense tensors")
