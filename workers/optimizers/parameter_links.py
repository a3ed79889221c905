"""Whose parameters an optimizer holds, and pointing it at those of the model that will be trained.

People build the optimizer before or after they prepare the model. A copy's parameters therefore remember, weakly, which
parameters they were copied from: an optimizer of the original can be bound to the copy, and one of another model is
told from it. An optimizer bound to neither would step on weights that nobody uses, without any error.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from cluster.errors import UserError
from workers.backends.parts.device_transfer import Moved, rebind_optimizer

_ANCESTORS: Any = WeakIdKeyDictionary()
"""Parameter of a copy -> weak references to the parameters it was copied from, the nearest first."""


def record_origin(copied: nn.Module, original: nn.Module) -> None:
    """Of parameters that have the same name in a copy and in what it was copied from."""
    named = dict(original.named_parameters())
    for name, mine in copied.named_parameters():
        theirs = named.get(name)
        if theirs is not None and mine is not theirs:
            _ANCESTORS[mine] = (weakref.ref(theirs), *_ANCESTORS.get(theirs, ()))


def update_after_move(moved: Moved, model: nn.Module, before: list[nn.Parameter]) -> None:
    """Parameters that a move replaced (XLA) descend from those that were there `before`."""
    for old in before:
        new = moved.get(id(old))
        if new is not None and new is not old:
            _ANCESTORS[new] = (weakref.ref(old), *_ANCESTORS.get(old, ()))


def check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module, device: torch.device) -> None:
    """Raises UserError for an optimizer that would train something else than `model`; changes nothing."""
    own, known = {id(p) for p in model.parameters()}, _descendants(model)
    held = list(_held(optimizer))
    strangers = [p for p in held if id(p) not in known]
    if len(strangers) == len(held):
        raise UserError(
            f"none of the {len(held)} tensors that the optimizer holds is a parameter of the model",
            "build it from the parameters of the model that you give here, or of the one that model was prepared from",
        )
    if strangers and any(id(p) not in own for p in held if id(p) in known):
        raise UserError(
            f"{len(strangers)} of the {len(held)} tensors that the optimizer holds have no counterpart in the prepared"
            " model",
            "give the model that the optimizer was built from; folding and quantizing replace parameters",
        )
    away = [p for p in strangers if p.device.type != device.type]
    if away:
        raise UserError(
            f"the optimizer holds {len(away)} tensors that are not the model's and stay on {away[0].device}",
            "build it from the parameters of the model that is given, all parts in one module",
        )


def bind(optimizer: torch.optim.Optimizer, model: nn.Module, device: torch.device, fused: bool) -> None:
    """Point `optimizer`, in place, at the parameters of `model`, which is on `device`; its state comes along.

    Schedulers that hold it stay valid. `fused` says whether torch's fused and foreach steps run on this device.
    """
    rebind_optimizer(optimizer, _descendants(model), device)
    for group in optimizer.param_groups if not fused else ():
        group.update({key: False for key in ("fused", "foreach") if group.get(key)})


def _held(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _descendants(model: nn.Module) -> Moved:
    """id of a parameter, or of one it descends from -> the parameter. Only ids of living tensors are in it."""
    found: Moved = {}
    for parameter in model.parameters():
        for ancestor in (reference() for reference in _ANCESTORS.get(parameter, ())):
            if ancestor is not None:
                found.setdefault(id(ancestor), parameter)
    return found | {id(p): p for p in model.parameters()}
