"""Find out what a module computes by running it.

Names and sources are not enough (transformers has 206 classes of RMS norms in 37 forms). A module has the form of an
operation if it returns the same results for test inputs, in float32 and in shorter dtypes.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrize

from workers.kernels import create

SHORT_DTYPES = (torch.bfloat16, torch.float16)
USUAL_EPS = (1e-6, 1e-5, 1e-8, 1e-12, torch.finfo(torch.float32).eps)
MAX_DIFFERING_SHARE = 0.05
"""Share of values in a shorter dtype that may differ by one unit in the last place: sums have another order."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Form:
    """The operation that a module computes.

    `names` are the module's attributes for weight and bias ("" for none), or for gate, up and down. `dtypes` were
    tested, with weights in the dtype of the rows; `options` are those of the operation.
    """

    operation: str
    dtypes: tuple[torch.dtype, ...]
    names: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class NotReplaceable(Exception):
    """Raised for a module that resembles an operation but must not be replaced; its text is the reason."""


def form_of(module: nn.Module) -> Form | None:
    """Return the form of a module, or None if it resembles no operation. Raises NotReplaceable with the reason."""
    if not _looks_like_one(module):
        return None
    check_replaceable(module)
    if any(True for _ in module.children()):
        return _gated(module)
    is_norm = any(True for _ in module.parameters()) or hasattr(module, "eps")
    return _norm(module) if is_norm else _activation(module)


def _looks_like_one(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    children = list(module.children())
    if any(True for _ in module.buffers()) or isinstance(module, torch.jit.ScriptModule):
        return False
    if children:
        linear = [child for child in children if _is_linear(child)]
        return not own and len(linear) == 3 and not any(list(c.parameters()) for c in children if c not in linear)
    if own:
        return len(own) <= 2 and all(p.dim() == 1 and len(p) == len(own[0]) for p in own)
    return type(module).forward is not nn.Module.forward and not isinstance(module, _EXCLUDED)


_EXCLUDED = (nn.Identity, nn.modules.dropout._DropoutNd, nn.modules.loss._Loss, nn.Flatten, nn.Unflatten)


def _is_linear(module: nn.Module) -> bool:
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def check_replaceable(module: nn.Module) -> None:
    """Raise NotReplaceable if replacing the module would change its behaviour."""
    if "forward" in vars(module):
        raise NotReplaceable("its forward was replaced")
    for part in module.modules():
        if any(getattr(part, name, None) for name in HOOKS):
            raise NotReplaceable("it has hooks")
        if parametrize.is_parametrized(part):
            raise NotReplaceable("it is parametrised")
        for value in part.parameters(recurse=False):
            if type(value) not in (nn.Parameter, Tensor) or not value.dtype.is_floating_point:
                raise NotReplaceable(f"its parameters are {type(value).__name__} in {value.dtype}")
            if value.device.type == "meta":
                raise NotReplaceable("its parameters are not loaded yet")


# Norms


def _norm(module: nn.Module) -> Form:
    """Test with random weights: those of a new model are all 1, which would hide an offset that is added to them."""
    module_copy = _with_random_weights(module)
    parameter_names = [name for name, _ in module_copy.named_parameters()]
    width = len(next(module_copy.parameters())) if parameter_names else _norm_width(module)
    x = _probe(width)
    output = _call_twice(module_copy, x)
    for operation, names, options in _norms(module, parameter_names):
        if _close(output, _reference(operation, module_copy, x, names, options), 2e-5):
            return _form_with_dtypes(module_copy, operation, names, options, x)
    raise NotReplaceable("it does not compute a norm that kernels implement")


def _norm_width(module: nn.Module) -> int:
    """Return the width of a norm without weights: its `normalized_shape`, or any if it accepts any."""
    shape = getattr(module, "normalized_shape", (64,))
    return int(shape[-1]) if isinstance(shape, tuple | list) and shape else 64


def _norms(module: nn.Module, own: list[str]) -> Iterator[tuple[str, tuple[str, ...], dict[str, Any]]]:
    """Iterate over possible (operation, names of weight and bias, options)."""
    for eps in _eps_of(module):
        for weight in [*own, ""] if len(own) < 2 else own:
            others = [name for name in own if name != weight]
            if len(own) == 2 or len(own) < 2:
                yield "layernorm", (weight, others[0] if others else ""), {"eps": eps}
            if not others:
                for offset in (0.0, 1.0) if weight else (0.0,):
                    yield "rmsnorm", (weight, ""), {"eps": eps, "offset": offset}


def _eps_of(module: nn.Module) -> list[float]:
    """Return candidates for eps: small numbers among the module's attributes, then the usual values."""
    own = [v for v in vars(module).values() if isinstance(v, float) and 0 < v <= 1e-2]
    return list(dict.fromkeys([*own, *USUAL_EPS]))


def _form_with_dtypes(
    module: nn.Module, operation: str, names: tuple[str, ...], options: dict[str, Any], x: Tensor
) -> Form:
    """Return the form with the dtypes in which it was confirmed, and how an RMS norm rounds in them."""
    dtypes, rounding = [torch.float32], None
    for dtype in SHORT_DTYPES:
        short, rows = copy.deepcopy(module).to(dtype), x[:, :4].to(dtype)
        try:
            output = _call_twice(short, rows)
        except NotReplaceable:
            continue
        choices = (False, True) if operation == "rmsnorm" and names[0] else (False,)
        shares = {
            choice: _differing_share(output, _reference(operation, short, rows, names, _with(options, choice)))
            for choice in choices
        }
        best = min(shares, key=lambda choice: shares[choice])
        if output.dtype == dtype and shares[best] <= MAX_DIFFERING_SHARE and rounding in (None, best):
            dtypes.append(dtype)
            rounding = best
    return Form(operation, tuple(dtypes), names, _with(options, bool(rounding)))


def _with(options: dict[str, Any], rounding: bool) -> dict[str, Any]:
    return options | {"round_before_weight": True} if rounding else options


def _with_random_weights(module: nn.Module) -> nn.Module:
    module_copy = copy.deepcopy(module).cpu().float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in module_copy.parameters():
            value.copy_(torch.randn(value.shape, generator=generator))
    return module_copy


def _probe(width: int) -> Tensor:
    """Return rows with a mean other than 0. The last ones are so small that eps matters."""
    x = torch.randn(2, 6, width, generator=torch.Generator().manual_seed(1)) + 0.5
    return torch.cat((x[:, :4], x[:, 4:] * 1e-3), 1)


@cache
def _reference_kernels() -> Any:
    return create("numpy")


def _reference(operation: str, module: nn.Module, x: Tensor, names: tuple[str, ...], options: dict[str, Any]) -> Tensor:
    vectors = [getattr(module, name) if name else None for name in names]
    with torch.no_grad():
        result: Tensor = getattr(_reference_kernels(), operation)(
            x, *(vectors[:1] if operation == "rmsnorm" else vectors), **options
        )
    return result


# Modules without weights, and gated layers


def _activation(module: nn.Module) -> Form | None:
    x = _probe(16) * 3
    dtypes = []
    for dtype in (torch.float32, *SHORT_DTYPES):
        rows = x.to(dtype)
        try:
            output = _call_twice(module, rows)
        except NotReplaceable:
            return None
        expected = F.silu(rows)
        if (
            _close(output, expected, 1e-5)
            if dtype == torch.float32
            else _differing_share(output, expected) <= MAX_DIFFERING_SHARE
        ):
            dtypes.append(dtype)
    return Form("silu", tuple(dtypes)) if torch.float32 in dtypes else None


def _gated(module: nn.Module) -> Form:
    """Test the module itself in its own dtype, because a copy of its weights could be large."""
    linear = {name: child for name, child in module.named_children() if _is_linear(child)}
    if any(isinstance(child, nn.modules.dropout._DropoutNd) and child.p for child in module.children()):
        raise NotReplaceable("it drops values at random")
    sizes = {name: (int(child.in_features), int(child.out_features)) for name, child in linear.items()}  # type: ignore[arg-type]
    weight = next(module.parameters())
    for gate, up, down in _roles(sizes):
        x = torch.randn(2, 3, sizes[gate][0], generator=torch.Generator().manual_seed(2)).to(weight.dtype)
        x = x.to(weight.device)
        try:
            with torch.no_grad():
                expected = linear[down](F.silu(linear[gate](x)) * linear[up](x))
        except RuntimeError as e:
            raise NotReplaceable(f"its products do not accept rows in {weight.dtype}") from e
        if _close(_call_twice(module, x), expected, 1e-5 if weight.dtype == torch.float32 else 2e-2):
            return Form("swiglu", (torch.float32, *SHORT_DTYPES), (gate, up, down))
    raise NotReplaceable("it is not a gated layer with SiLU")


def _roles(sizes: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str, str]]:
    """Iterate over the assignments of three linear layers to gate, up and down that their sizes allow."""
    for down, (hidden, _) in sizes.items():
        first = [name for name, (_, out) in sizes.items() if name != down and out == hidden]
        if len(first) == 2 and sizes[first[0]] == sizes[first[1]]:
            yield first[0], first[1], down
            yield first[1], first[0], down


# Comparing


def _call_twice(module: nn.Module, x: Tensor) -> Tensor:
    """Call the module twice and return its output. Raises NotReplaceable unless it returns equal rows both times."""
    forward: Callable[..., Any] = module.forward
    try:
        with torch.no_grad():
            first, second = forward(x.clone()), forward(x.clone())
    except Exception as e:  # a user's forward may raise anything
        raise NotReplaceable(f"it cannot be called with rows alone: {type(e).__name__}") from e
    if not isinstance(first, Tensor) or first.shape[:-1] != x.shape[:-1]:
        raise NotReplaceable("it does not return rows")
    if not torch.equal(first, second):
        raise NotReplaceable("it returns different results for the same call")
    return first


def _close(actual: Tensor, expected: Tensor, relative: float) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    least = relative * float(expected.abs().max())
    return bool(((actual - expected).abs().double() <= relative * expected.abs().double() + least * 0.1).all())


def _differing_share(actual: Tensor, expected: Tensor) -> float:
    """Return the share of values that differ; 1 if any differs by more than two units or the dtype differs."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return 1.0
    unit = torch.finfo(actual.dtype).eps
    errors = (actual.double() - expected.double()).abs()
    limit = 2 * unit * expected.double().abs() + torch.finfo(actual.dtype).tiny
    return 1.0 if bool((errors > limit).any()) else float((errors > 0).double().mean())
