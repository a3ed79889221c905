"""Moving models, optimizers and nested data to a device without losing what `Module.to` loses there.

On XLA `Module.to` makes new parameters: ties come undone, and an optimizer built before goes on with the old ones. On
every device it makes new buffers. Both are put right here, by identity, before anybody can notice.
"""

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError

Moved = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Slot:
    """One place in a module tree that holds a parameter or a buffer."""

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


def move_module(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> Moved:
    """Move in place, like `Module.to`; what was one tensor in two places stays one. Returns id of the old -> the new.

    The old tensors may be gone: ask only about tensors that somebody (an optimizer) still holds.
    """
    before = _slots(module)
    if dtype is not None:
        module.to(device, dtype)
    elif any(slot.tensor.device != device for slot in before):
        module.to(device)  # only then: torch cannot move quantised weights that a compiler has seen, not even nowhere
    moved: Moved = {}
    for slot in before:
        slot.table[slot.name] = moved.setdefault(id(slot.tensor), slot.table[slot.name])
    return moved


def rebind_optimizer(optimizer: torch.optim.Optimizer, moved: Moved, device: torch.device) -> None:
    """Point `optimizer`, in place, at the moved parameters and bring its state along; schedulers that hold it stay
    valid. Tensors that are not in `moved` stay: workers/optimizers/parameter_links.py refuses those that would be lost.
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
    """`value` rebuilt with every tensor in its lists, tuples and mappings changed; all else is kept as it is."""
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
    """The tensors in nested data, in order."""
    found: list[torch.Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor))
    return found


def move_to_device(value: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Nested data on `device`; a module is moved in place with its ties; an object with its own `to` uses that."""
    if isinstance(value, nn.Module):
        move_module(value, device)
        return value
    if not isinstance(value, torch.Tensor | list | dict) and callable(getattr(value, "to", None)):
        return value.to(device)
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def check_device(value: Any, device: torch.device) -> None:
    """Raises UserError when nested data has a tensor that is neither on the host nor on `device`."""
    strangers = [t.device for t in tensors_of(value) if t.device.type != "cpu" and t.device != device]
    if strangers:
        raise UserError(
            f"the sample input is on {strangers[0]}, the model goes to {device}",
            "give it on the CPU, or on that device",
        )
