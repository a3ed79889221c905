"""Batch norm folded into the convolution before it, for inference. Classes, names and forward code stay as they are."""

import copy

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

CONVOLUTIONS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}


class NotTraceable(Exception):
    """The model's forward depends on data in a way torch.fx cannot follow; the text says how."""


def fold(model: nn.Module) -> tuple[nn.Module, int]:
    """A copy of an eval-mode model with folded pairs, and how many; the copy is made only when there are any.

    The graph is only read, to learn which convolution feeds a batch norm and nothing else. No traced code is run later,
    so nothing of the traced sizes can be baked in. Raises NotTraceable.
    """
    pairs = _pairs(model)
    if not pairs:
        return model, 0
    folded = copy.deepcopy(model)
    for conv_name, bn_name in pairs:
        conv, bn = folded.get_submodule(conv_name), folded.get_submodule(bn_name)
        _put(folded, conv_name, fuse_conv_bn_eval(conv, bn))  # type: ignore[type-var, arg-type]
        _put(folded, bn_name, nn.Identity())
    return folded, len(pairs)


def _pairs(model: nn.Module) -> list[tuple[str, str]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    calls = _calls(model)
    once = {str(n.target) for n in calls if sum(m.target == n.target for m in calls) == 1}
    found = []
    for conv, bn in ((n.args[0], n) for n in calls if n.args):
        if not isinstance(conv, fx.Node) or conv.op != "call_module" or len(conv.users) != 1:
            continue
        names = str(conv.target), str(bn.target)
        if once.issuperset(names) and _foldable(modules[names[0]], modules[names[1]], modules):
            found.append(names)
    return found


def _calls(model: nn.Module) -> list[fx.Node]:
    try:
        return [node for node in fx.symbolic_trace(model).graph.nodes if node.op == "call_module"]
    except Exception as e:  # tracing runs the user's forward on proxies: anything may come out of it
        raise NotTraceable(f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}") from e


def _foldable(conv: nn.Module, bn: nn.Module, modules: dict[str, nn.Module]) -> bool:
    shared = [sum(m is one for m in modules.values()) > 1 for one in (conv, bn)]
    return (
        type(bn) is CONVOLUTIONS.get(type(conv)) and not any(shared) and not bn.training and bn.running_mean is not None
    )


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent) if parent else root, leaf, module)
