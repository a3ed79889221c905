"""Fold batch norms into the convolutions before them, for inference. Classes, names and forward code do not change."""

import copy
from collections.abc import Callable, Iterable

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

CONVOLUTIONS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}


class NotTraceable(Exception):
    """torch.fx cannot trace the model's forward, which may depend on data. The text contains the error."""


def foldable_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Find the (convolution, batch norm) names of an eval-mode model where the convolution feeds only that norm.

    The traced graph is only read. Its code is never run, so no traced size can become a constant. Raises NotTraceable.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    calls = _calls(model)
    once = {str(n.target) for n in calls if sum(m.target == n.target for m in calls) == 1}
    foldable = []
    for conv, bn in ((n.args[0], n) for n in calls if n.args):
        if not isinstance(conv, fx.Node) or conv.op != "call_module" or len(conv.users) != 1:
            continue
        names = str(conv.target), str(bn.target)
        if once.issuperset(names) and _foldable(modules[names[0]], modules[names[1]], modules):
            foldable.append(names)
    return foldable


def fold(model: nn.Module, names: Iterable[tuple[str, str]]) -> Callable[[], None]:
    """Fold these pairs of `model` in place. Returns a function that restores the original modules."""
    before = {name: model.get_submodule(name) for pair in names for name in pair}
    for conv, bn in names:
        _replace_module(model, conv, fuse_conv_bn_eval(before[conv], before[bn]))  # type: ignore[type-var, arg-type]
        _replace_module(model, bn, nn.Identity())

    def undo() -> None:
        for name, module in before.items():
            _replace_module(model, name, module)

    return undo


def _calls(model: nn.Module) -> list[fx.Node]:
    """Trace a copy that shares the parameters, because a forward may leave proxies in attributes or change buffers."""
    try:
        model_copy = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        return [node for node in fx.symbolic_trace(model_copy).graph.nodes if node.op == "call_module"]
    except Exception as e:  # tracing runs the user's forward on proxies, which may raise anything
        raise NotTraceable(f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}") from e


def _foldable(conv: nn.Module, bn: nn.Module, modules: dict[str, nn.Module]) -> bool:
    shared = [sum(m is one for m in modules.values()) > 1 for one in (conv, bn)]
    return (
        type(bn) is CONVOLUTIONS.get(type(conv)) and not any(shared) and not bn.training and bn.running_mean is not None
    )


def _replace_module(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent) if parent else root, leaf, module)
