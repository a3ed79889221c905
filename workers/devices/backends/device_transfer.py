"""Move models, optimizers and nested data to a device, and keep tied parameters and optimizers intact.

On XLA `Module.to` creates new parameters: it unties tied ones, and an existing optimizer keeps updating the old ones.
On every device it creates new buffers. This module restores both, by the identity of the tensors.
"""

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError

MovedTensors = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Reference to one parameter or buffer in a module tree: the dict that contains it and its key there."""

    table: dict[str, Any]
    name: str
    tensor: torch.Tensor


def _slots(module: nn.Module) -> list[_Slot]:
    return [
        _Slot(table, name, tensor)
        for child in module.modules()
        for table in (child._parameters, child._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]


def move_module(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> MovedTensors:
    """Move in place, like `Module.to`, but keep tied tensors tied. Returns id of each old tensor -> new tensor.

    An id is valid only while something, such as an optimizer, still references the old tensor.
    """
    old_slots = _slots(module)
    if dtype is not None:
        module.to(device, dtype)
    elif any(slot.tensor.device != device for slot in old_slots):
        # Not otherwise: torch cannot move quantized weights after compilation, not even to the device they are on.
        module.to(device)
    moved: MovedTensors = {}
    for slot in old_slots:
        slot.table[slot.name] = moved.setdefault(id(slot.tensor), slot.table[slot.name])
    return moved


def rebind_optimizer(optimizer: torch.optim.Optimizer, moved: MovedTensors, device: torch.device) -> None:
    """Point `optimizer`, in place, at the moved parameters and move its state; schedulers of it stay valid.

    Tensors that are not in `moved` stay; workers/models/optimizers/parameter_links.py rejects those that would be lost.
    """
    groups = optimizer.param_groups
    old_state = dict(optimizer.state)
    flags = {id(p): bool(g.get("capturable") or g.get("fused")) for g in groups for p in g["params"]}
    for group in groups:
        group["params"][:] = [moved.get(id(p), p) for p in group["params"]]
    optimizer.state.clear()
    for parameter, state in old_state.items():
        step_too = flags.get(id(parameter), False)
        optimizer.state[moved.get(id(parameter), parameter)] = {
            key: value.to(device) if isinstance(value, torch.Tensor) and (key != "step" or step_too) else value
            for key, value in state.items()
        }


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Rebuild `value` with `change` applied to every tensor in its lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, MutableMapping):
        changed: Any = copy.copy(value)
        for key, item in value.items():
            changed[key] = map_tensors(item, change)
        return changed
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """List the tensors in nested data, in order."""
    tensors: list[torch.Tensor] = []
    map_tensors(value, lambda tensor: tensors.append(tensor))
    return tensors


def move_to_device(value: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move nested data to `device`. A module moves in place with its ties; other objects move by their `to`."""
    if isinstance(value, nn.Module):
        move_module(value, device)
        return value
    if not isinstance(value, torch.Tensor | list | dict) and callable(getattr(value, "to", None)):
        return value.to(device)
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def check_device(value: Any, device: torch.device) -> None:
    """Raise UserError if nested data has a tensor that is neither on the host nor on `device`."""
    other_devices = [t.device for t in tensors_of(value) if t.device.type != "cpu" and t.device != device]
    if other_devices:
        raise UserError(
            f"the sample input is on {other_devices[0]}, but the model moves to {device}",
            f"pass the sample input on the CPU or on {device}",
        )
