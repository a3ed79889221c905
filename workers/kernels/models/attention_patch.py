"""Attention of transformers' models: rotary embedding and attention are functions of a module there, shared by all
models, and so is `AttentionInterface`. A module with kernels has a forward of the same code that sees other functions
under those names, in its own class: no other model notices.

What our functions do not know (dropout, masks of other forms, several tables in a batch) goes to the functions that
were there. Masks are those of the implementation that the model's configuration names, "sdpa" or "eager".
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from workers.kernels import operators
from workers.kernels.models.module_forms import SHORTER, Form
from workers.kernels.parts.formulas import rotated

ROPE, INTERFACE = "apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"
DTYPES = (torch.float32, *SHORTER)
MASKS_OF = ("sdpa", "eager")
ASKED = ("position_bias", "softcap", "s_aux", "cache", "output_attentions")
"""Of what models ask an attention function: given one of these, theirs computes it."""
Key = tuple[tuple[str, str], ...]
"""Operations and the kernels for each."""


def forms_of(module: nn.Module) -> list[Form]:
    """`apply_rope` and `attention`, as far as the module's forward calls them by those names."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or not {ROPE, INTERFACE} & {*forward.__code__.co_names}:
        return []
    found, known = [], forward.__globals__
    if ROPE in forward.__code__.co_names and (layout := _layout_of(known.get(ROPE))):
        found.append(Form("apply_rope", DTYPES, options={"layout": layout}))
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "")
    if INTERFACE in forward.__code__.co_names and implementation in MASKS_OF:
        found.append(Form("attention", DTYPES))
    return found


def rebound(base: type[nn.Module], key: Key) -> Callable[..., Any]:
    """The forward of `base`, which sees functions that call kernels."""
    forward, wanted = base.forward, dict(key)
    known = dict(forward.__globals__)
    known.pop("__name__", None)  # torch.compile would look names up in the module of that name, where the others are
    if "apply_rope" in wanted:
        known[ROPE] = _rope(known[ROPE], _layout_of(known[ROPE]), wanted["apply_rope"])
    if "attention" in wanted:
        known[INTERFACE] = _Interface(known[INTERFACE], wanted["attention"])
    made = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _layout_of(function: Any) -> str:
    """How it pairs values, tried in float32 and bfloat16; "" for another function."""
    if not callable(function):
        return ""
    for layout in ("halves", "pairs"):
        if all(_turns_alike(function, layout, dtype) for dtype in (torch.float32, torch.bfloat16)):
            return layout
    return ""


def _turns_alike(function: Any, layout: str, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, heads, 5, 16, generator=generator).to(dtype) for heads in (4, 2))
    angles = torch.arange(5)[:, None] * 10.0 ** (-torch.arange(8) / 8)
    tables = [t.to(dtype) for t in (angles.cos(), angles.sin())]
    spread = [torch.cat((t, t), -1) if layout == "halves" else t.repeat_interleave(2, -1) for t in tables]
    try:
        with torch.no_grad():
            have = function(q, k, spread[0][None], spread[1][None])
    except Exception:  # whatever a stranger's function raises: it is another one
        return False
    limit = 1e-6 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    return len(have) == 2 and all(
        one.dtype == dtype
        and bool(((one - rotated(x, tables[0], tables[1], layout == "pairs")).abs() <= limit * 4).all())
        for one, x in zip(have, (q, k), strict=True)
    )


def _rope(theirs: Callable[..., Any], layout: str, kernels: str) -> Callable[..., Any]:
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> Any:
        if rest or named or not _one_table(q, cos) or q.dtype not in DTYPES:
            return theirs(q, k, cos, sin, *rest, **named)
        half = cos.shape[-1] // 2
        tables = [table[0, :, :half] if layout == "halves" else table[0, :, ::2] for table in (cos, sin)]
        return tuple(operators.apply_rope(x, *tables, layout=layout, kernels=kernels) for x in (q, k))

    return apply_rotary_pos_emb


def _one_table(q: Tensor, cos: Tensor) -> bool:
    """The same positions for the whole batch, and as many as there are tokens."""
    whole = cos.dim() == 3 and cos.shape[0] == 1 and q.dim() == 4
    return whole and cos.shape[1] == q.shape[2] and cos.shape[2] <= q.shape[3] and cos.dtype in (q.dtype, torch.float32)


class _Interface:
    """In the place of transformers' AttentionInterface, as far as models ask it."""

    def __init__(self, theirs: Any, kernels: str):
        self.theirs, self.kernels = theirs, kernels

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = self.theirs.get_interface(name, default)
        return _attention(found, self.kernels) if name in MASKS_OF else found

    def __getitem__(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = self.theirs[name]
        return _attention(found, self.kernels) if name in MASKS_OF else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)


def _attention(theirs: Callable[..., Any], kernels: str) -> Callable[..., Any]:
    def attention_forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **named: Any,
    ) -> Any:
        asked, kept = query.shape[-2], key.shape[-2]
        other = any(named.get(name) is not None and named.get(name) is not False for name in ASKED)
        learns = attention_mask is not None and attention_mask.requires_grad
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        causal = causal and asked > 1 and attention_mask is None
        if dropout or other or learns or query.dtype not in DTYPES or (causal and asked != kept):
            given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **named}
            return theirs(module, query, key, value, attention_mask, **given)
        mask = attention_mask if attention_mask is None else attention_mask[..., :kept]
        seen = operators.attention(query, key, value, scale=scaling, mask=mask, causal=causal, kernels=kernels)
        return seen.transpose(1, 2).contiguous(), None

    return attention_forward
