"""Find out whose parameters an optimizer holds, and bind it to those of the model that will be trained.

Users build the optimizer before or after they prepare the model. Parameters of a copy therefore hold weak references to
those they were copied from: an optimizer of the original can be bound to the copy, and one of another model is
detected. An optimizer of neither would update unused weights without any error.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from cluster.errors import UserError
from workers.devices.backends.device_transfer import MovedTensors, rebind_optimizer

_ANCESTORS: Any = WeakIdKeyDictionary()
"""Parameter of a copy -> weak references to the parameters it was copied from, the nearest first."""


def record_origin(copied: nn.Module, original: nn.Module) -> None:
    """Record which parameter of the original each parameter of a copy comes from, by name."""
    named = dict(original.named_parameters())
    for name, parameter in copied.named_parameters():
        source = named.get(name)
        if source is not None and parameter is not source:
            _ANCESTORS[parameter] = (weakref.ref(source), *_ANCESTORS.get(source, ()))


def update_after_move(moved: MovedTensors, before: list[nn.Parameter]) -> None:
    """Record that parameters which a move replaced (XLA) come from those in `before`."""
    for old in before:
        new = moved.get(id(old))
        if new is not None and new is not old:
            _ANCESTORS[new] = (weakref.ref(old), *_ANCESTORS.get(old, ()))


def check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module, device: torch.device) -> None:
    """Raise UserError for an optimizer that would train anything but `model`. Changes nothing."""
    own_ids, related = {id(p) for p in model.parameters()}, _descendants(model)
    tensors = list(_optimizer_tensors(optimizer))
    unrelated = [p for p in tensors if id(p) not in related]
    if len(unrelated) == len(tensors):
        raise UserError(
            f"none of the {len(tensors)} tensors that the optimizer holds is a parameter of the model",
            "build it from the parameters of the model that you pass, or of the one that it was prepared from",
        )
    if unrelated and any(id(p) not in own_ids for p in tensors if id(p) in related):
        raise UserError(
            f"{len(unrelated)} of the {len(tensors)} tensors that the optimizer holds have no counterpart in the "
            "prepared model",
            "pass the model that the optimizer was built from; folding and quantizing replace parameters",
        )
    misplaced = [p for p in unrelated if p.device.type != device.type]
    if misplaced:
        raise UserError(
            f"the optimizer holds {len(misplaced)} tensors that are not the model's and stay on {misplaced[0].device}",
            "build it from the parameters of the model that you pass, with all parts in one module",
        )


def bind_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, device: torch.device, fused: bool) -> None:
    """Bind `optimizer`, in place and with its state, to the parameters of `model`, which is on `device`.

    Schedulers that hold it stay valid. `fused` says whether torch's fused and foreach steps run on this device.
    """
    rebind_optimizer(optimizer, _descendants(model), device)
    for group in optimizer.param_groups if not fused else ():
        group.update({key: False for key in ("fused", "foreach") if group.get(key)})


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _descendants(model: nn.Module) -> MovedTensors:
    """Map the id of each parameter, and of those it was copied from, to the parameter. Only for tensors still alive."""
    descendants: MovedTensors = {}
    for parameter in model.parameters():
        for ancestor in (reference() for reference in _ANCESTORS.get(parameter, ())):
            if ancestor is not None:
                descendants.setdefault(id(ancestor), parameter)
    return descendants | {id(p): p for p in model.parameters()}
