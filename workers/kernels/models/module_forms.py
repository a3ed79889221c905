"""What a module computes, found out by running it: names and sources tell too little (transformers has 206 classes of
RMS norms in 37 forms). A module that answers probes as an operation does, in float32 and in shorter dtypes, has its
form.
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

SHORTER = (torch.bfloat16, torch.float16)
USUAL_EPS = (1e-6, 1e-5, 1e-8, 1e-12, torch.finfo(torch.float32).eps)
DIFFERING = 0.05
"""Share of a shorter dtype's values that may differ by a unit in the last place: sums are added in other orders."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Form:
    """`names` are the module's own: of weight and bias, "" for none, or of gate, up and down. `dtypes` were tried, with
    weights in the dtype of the rows; `options` are the operation's.
    """

    operation: str
    dtypes: tuple[torch.dtype, ...]
    names: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class Unlike(Exception):
    """Raised for a module that looks like an operation and is not to be swapped; its text is the reason."""


def form_of(module: nn.Module) -> Form | None:
    """None for a module that does not look like any operation. Raises Unlike with the reason for one that does."""
    if not _looks_like_one(module):
        return None
    require_untouched(module)
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
    return type(module).forward is not nn.Module.forward and not isinstance(module, _NEVER)


_NEVER = (nn.Identity, nn.modules.dropout._DropoutNd, nn.modules.loss._Loss, nn.Flatten, nn.Unflatten)


def _is_linear(module: nn.Module) -> bool:
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def require_untouched(module: nn.Module) -> None:
    """Raises Unlike for what a swap would change the meaning of."""
    if "forward" in vars(module):
        raise Unlike("its forward was replaced")
    for part in module.modules():
        if any(getattr(part, name, None) for name in HOOKS):
            raise Unlike("it has hooks")
        if parametrize.is_parametrized(part):
            raise Unlike("it is parametrised")
        for value in part.parameters(recurse=False):
            if type(value) not in (nn.Parameter, Tensor) or not value.dtype.is_floating_point:
                raise Unlike(f"its parameters are {type(value).__name__} in {value.dtype}")
            if value.device.type == "meta":
                raise Unlike("its parameters are not loaded yet")


# Norms


def _norm(module: nn.Module) -> Form:
    """Tried with weights drawn at random: those of a fresh model are all one, and hide whether one is added to them."""
    mine = _with_drawn_weights(module)
    own = [name for name, _ in mine.named_parameters()]
    width = len(next(mine.parameters())) if own else _told_width(module)
    x = _probe(width)
    answer = _answer(mine, x)
    for operation, names, options in _norms(module, own):
        if _close(answer, _reference(operation, mine, x, names, options), 2e-5):
            return _rounded(mine, operation, names, options, x)
    raise Unlike("it computes none of the norms that kernels have")


def _told_width(module: nn.Module) -> int:
    """Of a norm without weights: what torch's say, or any, where any is taken."""
    shape = getattr(module, "normalized_shape", (64,))
    return int(shape[-1]) if isinstance(shape, tuple | list) and shape else 64


def _norms(module: nn.Module, own: list[str]) -> Iterator[tuple[str, tuple[str, ...], dict[str, Any]]]:
    """Operations with the names of weight and bias, and options."""
    for eps in _eps_of(module):
        for weight in [*own, ""] if len(own) < 2 else own:
            others = [name for name in own if name != weight]
            if len(own) == 2 or len(own) < 2:
                yield "layernorm", (weight, others[0] if others else ""), {"eps": eps}
            if not others:
                for offset in (0.0, 1.0) if weight else (0.0,):
                    yield "rmsnorm", (weight, ""), {"eps": eps, "offset": offset}


def _eps_of(module: nn.Module) -> list[float]:
    """Small numbers that the module has, then the usual ones."""
    own = [v for v in vars(module).values() if isinstance(v, float) and 0 < v <= 1e-2]
    return list(dict.fromkeys([*own, *USUAL_EPS]))


def _rounded(mine: nn.Module, operation: str, names: tuple[str, ...], options: dict[str, Any], x: Tensor) -> Form:
    """The form, with the dtypes in which it holds, and how an RMS norm rounds in them."""
    dtypes, rounding = [torch.float32], None
    for dtype in SHORTER:
        short, given = copy.deepcopy(mine).to(dtype), x[:, :4].to(dtype)
        try:
            answer = _answer(short, given)
        except Unlike:
            continue
        ways = (False, True) if operation == "rmsnorm" and names[0] else (False,)
        shares = {
            way: _differing(answer, _reference(operation, short, given, names, _with(options, way))) for way in ways
        }
        best = min(shares, key=lambda way: shares[way])
        if answer.dtype == dtype and shares[best] <= DIFFERING and rounding in (None, best):
            dtypes.append(dtype)
            rounding = best
    return Form(operation, tuple(dtypes), names, _with(options, bool(rounding)))


def _with(options: dict[str, Any], rounding: bool) -> dict[str, Any]:
    return options | {"round_before_weight": True} if rounding else options


def _with_drawn_weights(module: nn.Module) -> nn.Module:
    mine = copy.deepcopy(module).cpu().float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in mine.parameters():
            value.copy_(torch.randn(value.shape, generator=generator))
    return mine


def _probe(width: int) -> Tensor:
    """Rows with a mean that is not 0; the last are so small that eps counts."""
    x = torch.randn(2, 6, width, generator=torch.Generator().manual_seed(1)) + 0.5
    return torch.cat((x[:, :4], x[:, 4:] * 1e-3), 1)


@cache
def _exact() -> Any:
    return create("numpy")


def _reference(operation: str, module: nn.Module, x: Tensor, names: tuple[str, ...], options: dict[str, Any]) -> Tensor:
    given = [getattr(module, name) if name else None for name in names]
    with torch.no_grad():
        answer: Tensor = getattr(_exact(), operation)(x, *(given[:1] if operation == "rmsnorm" else given), **options)
    return answer


# What has no weights, and gated layers


def _activation(module: nn.Module) -> Form | None:
    x = _probe(16) * 3
    dtypes = []
    for dtype in (torch.float32, *SHORTER):
        given = x.to(dtype)
        try:
            answer = _answer(module, given)
        except Unlike:
            return None
        want = F.silu(given)
        if _close(answer, want, 1e-5) if dtype == torch.float32 else _differing(answer, want) <= DIFFERING:
            dtypes.append(dtype)
    return Form("silu", tuple(dtypes)) if torch.float32 in dtypes else None


def _gated(module: nn.Module) -> Form:
    """Run as it is, in its own dtype: a copy of its weights could be large."""
    linear = {name: child for name, child in module.named_children() if _is_linear(child)}
    if any(isinstance(child, nn.modules.dropout._DropoutNd) and child.p for child in module.children()):
        raise Unlike("it drops values at random")
    sizes = {name: (int(child.in_features), int(child.out_features)) for name, child in linear.items()}  # type: ignore[arg-type]
    weight = next(module.parameters())
    for gate, up, down in _roles(sizes):
        x = torch.randn(2, 3, sizes[gate][0], generator=torch.Generator().manual_seed(2)).to(weight.dtype)
        x = x.to(weight.device)
        try:
            with torch.no_grad():
                want = linear[down](F.silu(linear[gate](x)) * linear[up](x))
        except RuntimeError as e:
            raise Unlike(f"its products take no rows in {weight.dtype}") from e
        if _close(_answer(module, x), want, 1e-5 if weight.dtype == torch.float32 else 2e-2):
            return Form("swiglu", (torch.float32, *SHORTER), (gate, up, down))
    raise Unlike("it computes no gated layer with SiLU")


def _roles(sizes: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str, str]]:
    """Which of three products may be gate, up and down, by their sizes."""
    for down, (hidden, _) in sizes.items():
        first = [name for name, (_, out) in sizes.items() if name != down and out == hidden]
        if len(first) == 2 and sizes[first[0]] == sizes[first[1]]:
            yield first[0], first[1], down
            yield first[1], first[0], down


# Comparing


def _answer(module: nn.Module, x: Tensor) -> Tensor:
    """What it answers, the same twice, in the shape of `x`'s rows. Raises Unlike for anything else."""
    forward: Callable[..., Any] = module.forward
    try:
        with torch.no_grad():
            first, second = forward(x.clone()), forward(x.clone())
    except Exception as e:  # whatever a stranger's forward raises
        raise Unlike(f"it does not take rows alone: {type(e).__name__}") from e
    if not isinstance(first, Tensor) or first.shape[:-1] != x.shape[:-1]:
        raise Unlike("it does not answer with rows")
    if not torch.equal(first, second):
        raise Unlike("it answers the same call in two ways")
    return first


def _close(have: Tensor, want: Tensor, relative: float) -> bool:
    if have.shape != want.shape or have.dtype != want.dtype:
        return False
    least = relative * float(want.abs().max())
    return bool(((have - want).abs().double() <= relative * want.abs().double() + least * 0.1).all())


def _differing(have: Tensor, want: Tensor) -> float:
    """The share of values that are not the same; all, if one is more than two units off or of another dtype."""
    if have.shape != want.shape or have.dtype != want.dtype:
        return 1.0
    unit = torch.finfo(have.dtype).eps
    off = (have.double() - want.double()).abs()
    limit = 2 * unit * want.double().abs() + torch.finfo(have.dtype).tiny
    return 1.0 if bool((off > limit).any()) else float((off > 0).double().mean())
