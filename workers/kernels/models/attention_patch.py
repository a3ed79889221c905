"""Replace rotary embedding and attention in models of the transformers library.

There they are global functions of a Python module, shared by all models, as is `AttentionInterface`. A module with
kernels gets its own class, whose forward has the same code but other functions under those names. Other models are not
affected. Cases that our functions do not support (dropout, other kinds of masks, several tables in a batch) are passed
to the original functions. Masks are those of the implementation in the model's configuration, "sdpa" or "eager".
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from workers.kernels.dispatch import operators
from workers.kernels.formulas import rotated
from workers.kernels.models.module_forms import SHORT_DTYPES, Form

ROPE, INTERFACE = "apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"
DTYPES = (torch.float32, *SHORT_DTYPES)
MASK_IMPLEMENTATIONS = ("sdpa", "eager")
UNSUPPORTED_ARGUMENTS = ("position_bias", "softcap", "s_aux", "cache", "output_attentions")
"""Arguments of attention functions that kernels do not support: with one of these the original computes it."""
Key = tuple[tuple[str, str], ...]
"""Pairs of (operation, name of its kernels)."""


def forms_of(module: nn.Module) -> list[Form]:
    """Return the forms `apply_rope` and `attention` if the module's forward calls the functions of transformers that
    they replace.
    """
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or not {ROPE, INTERFACE} & {*forward.__code__.co_names}:
        return []
    forms, namespace = [], forward.__globals__
    if ROPE in forward.__code__.co_names and (layout := _layout_of(namespace.get(ROPE))):
        forms.append(Form("apply_rope", DTYPES, options={"layout": layout}))
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "")
    if INTERFACE in forward.__code__.co_names and implementation in MASK_IMPLEMENTATIONS:
        forms.append(Form("attention", DTYPES))
    return forms


def rebind_forward(base: type[nn.Module], key: Key) -> Callable[..., Any]:
    """Return the forward of `base` with global functions that call kernels."""
    forward, kernels = base.forward, dict(key)
    namespace = dict(forward.__globals__)
    namespace.pop("__name__", None)  # torch.compile would look up the originals in the module of that name
    if "apply_rope" in kernels:
        namespace[ROPE] = _rope(namespace[ROPE], _layout_of(namespace[ROPE]), kernels["apply_rope"])
    if "attention" in kernels:
        namespace[INTERFACE] = _Interface(namespace[INTERFACE], kernels["attention"])
    function = FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return function


def _layout_of(function: Any) -> str:
    """Test in float32 and bfloat16 how a rope function pairs values. Return "" if it is another function."""
    if not callable(function):
        return ""
    for layout in ("halves", "pairs"):
        if all(_rotates_alike(function, layout, dtype) for dtype in (torch.float32, torch.bfloat16)):
            return layout
    return ""


def _rotates_alike(function: Any, layout: str, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, heads, 5, 16, generator=generator).to(dtype) for heads in (4, 2))
    angles = torch.arange(5)[:, None] * 10.0 ** (-torch.arange(8) / 8)
    tables = [t.to(dtype) for t in (angles.cos(), angles.sin())]
    full_tables = [torch.cat((t, t), -1) if layout == "halves" else t.repeat_interleave(2, -1) for t in tables]
    try:
        with torch.no_grad():
            actual = function(q, k, full_tables[0][None], full_tables[1][None])
    except Exception:  # any error means that it is another function
        return False
    limit = 1e-6 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    return len(actual) == 2 and all(
        one.dtype == dtype
        and bool(((one - rotated(x, tables[0], tables[1], layout == "pairs")).abs() <= limit * 4).all())
        for one, x in zip(actual, (q, k), strict=True)
    )


def _rope(original: Callable[..., Any], layout: str, kernels: str) -> Callable[..., Any]:
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> Any:
        if rest or named or not _one_table(q, cos) or q.dtype not in DTYPES:
            return original(q, k, cos, sin, *rest, **named)
        half = cos.shape[-1] // 2
        tables = [table[0, :, :half] if layout == "halves" else table[0, :, ::2] for table in (cos, sin)]
        return tuple(operators.apply_rope(x, *tables, layout=layout, kernels=kernels) for x in (q, k))

    return apply_rotary_pos_emb


def _one_table(q: Tensor, cos: Tensor) -> bool:
    """Return whether one table serves the entire batch and has a row for each token."""
    is_shared = cos.dim() == 3 and cos.shape[0] == 1 and q.dim() == 4
    return (
        is_shared
        and cos.shape[1] == q.shape[2]
        and cos.shape[2] <= q.shape[3]
        and cos.dtype in (q.dtype, torch.float32)
    )


class _Interface:
    """Wrapper of transformers' AttentionInterface, which returns functions that call kernels."""

    def __init__(self, wrapped: Any, kernels: str):
        self.wrapped, self.kernels = wrapped, kernels

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function: Callable[..., Any] = self.wrapped.get_interface(name, default)
        return _attention(function, self.kernels) if name in MASK_IMPLEMENTATIONS else function

    def __getitem__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = self.wrapped[name]
        return _attention(function, self.kernels) if name in MASK_IMPLEMENTATIONS else function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


def _attention(original: Callable[..., Any], kernels: str) -> Callable[..., Any]:
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
        query_tokens, key_tokens = query.shape[-2], key.shape[-2]
        has_other_options = any(
            named.get(name) is not None and named.get(name) is not False for name in UNSUPPORTED_ARGUMENTS
        )
        mask_needs_gradient = attention_mask is not None and attention_mask.requires_grad
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        causal = causal and query_tokens > 1 and attention_mask is None
        if (
            dropout
            or has_other_options
            or mask_needs_gradient
            or query.dtype not in DTYPES
            or (causal and query_tokens != key_tokens)
        ):
            options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **named}
            return original(module, query, key, value, attention_mask, **options)
        mask = attention_mask if attention_mask is None else attention_mask[..., :key_tokens]
        output = operators.attention(query, key, value, scale=scaling, mask=mask, causal=causal, kernels=kernels)
        return output.transpose(1, 2).contiguous(), None

    return attention_forward
