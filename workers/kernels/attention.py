"""Attention. Letters of shapes: B batch (all leading dimensions), H query heads, G key and value heads, T query tokens,
S key tokens, D width of a head, E width of a value.
"""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from cluster.errors import UserError
from workers.kernels.arrays import Operand, number
from workers.kernels.calls import Call, shape_text
from workers.kernels.device import KernelDevice


class Attention(KernelDevice):
    """If G < H, each key head serves H / G consecutive query heads (grouped queries). Methods raise as Rows."""

    def compute_attention_scores(self, q: Any, k: Any, *, scale: float | None = None, out: Any = None) -> Any:
        """q [B…, H, T, D] times the transpose of k [B…, G, S, D], times `scale` (None: 1 / √D): [B…, H, T, S].

        Arrays without a dimension for heads, [T, D] and [S, D], have one head.
        """
        call = Call(self)
        queries, keys = call.take("q", q, 2), call.take("k", k, 2)
        batch, heads, groups = heads_of(queries, keys)
        (length, width), many = queries.tensor.shape[-2:], keys.tensor.shape[-2]
        filled = call.output(out, (*queries.tensor.shape[:-1], many))
        factor = attention_scale(scale, width)
        if filled.tensor.numel():
            array_q = call.array(queries, (batch, heads, length, width))
            array_k = call.array(keys, (batch, groups, many, width))
            call.run(self._scores, array_q, array_k, call.written(filled, (batch, heads, length, many)), factor)
        return call.result(filled)

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float | None = None,
        mask: Any = None,
        causal: bool = False,
        return_lse: bool = False,
        out: Any = None,
    ) -> Any:
        """softmax(q kᵀ · scale + mask) v: q [B…, H, T, D], k [B…, G, S, D], v [B…, G, S, E], result [B…, H, T, E].

        `mask` broadcasts to [B…, H, T, S]: bool, True for visible tokens, or additive, in q's dtype or float32.
        `causal` counts from the end: token t attends to s ≤ t + S - T, as a decoder with a cache needs (torch's
        `is_causal` counts from the beginning). A token that attends to none gets zeros. `return_lse` also returns the
        logarithm of the sum of the exponentials, float32 [B…, H, T]: -inf for a token that attends to none.
        """
        call = Call(self)
        queries, keys, values = call.take("q", q, 2), call.take("k", k, 2), call.take("v", v, 2)
        batch, heads, groups = heads_of(queries, keys)
        if values.tensor.shape[:-1] != keys.tensor.shape[:-1]:
            shapes = f"k has shape {shape_text(keys.tensor)}, v {shape_text(values.tensor)}"
            raise UserError(shapes, "all but their last dimensions must be equal")
        (length, width), (many, wide) = queries.tensor.shape[-2:], values.tensor.shape[-2:]
        mask_operand = attention_mask(call, mask, queries, many) if mask is not None else None
        filled = call.output(out, (*queries.tensor.shape[:-1], wide))
        sums = call.output(None, queries.tensor.shape[:-1], dtype=torch.float32) if return_lse else None
        factor = attention_scale(scale, width)
        if filled.tensor.numel():
            arrays = (
                call.array(queries, (batch, heads, length, width)),
                call.array(keys, (batch, groups, many, width)),
                call.array(values, (batch, groups, many, wide)),
                None if mask_operand is None else call.array(mask_operand, mask_operand.tensor.shape),
                call.written(filled, (batch, heads, length, wide)),
                call.written(sums, (batch, heads, length)) if sums else None,
            )
            call.run(self._attention, *arrays, factor, bool(causal))
        result = call.result(filled)
        return (result, sums.returned(sums.tensor)) if sums else result

    # Hooks get contiguous arrays and fill `out`. No dimension of `out` is 0, but S and D may be.

    @abstractmethod
    def _scores(self, q_BHTD: Any, k_BGSD: Any, out_BHTS: Any, scale: float) -> Tensor | None: ...

    @abstractmethod
    def _attention(
        self,
        q_BHTD: Any,
        k_BGSD: Any,
        v_BGSE: Any,
        mask_BHTS: Any,
        out_BHTE: Any,
        lse_BHT: Any,
        scale: float,
        causal: bool,
    ) -> Tensor | None:
        """`mask_BHTS` may be None; each of its dimensions has the letter's size, or 1 to broadcast. It is bool,
        float32, or in q's dtype. `lse_BHT` may be None.
        """


def heads_of(queries: Operand, keys: Operand) -> tuple[int, int, int]:
    """Return (batch, query heads, key heads). Raises UserError if the shapes do not match."""
    q, k = queries.tensor, keys.tensor
    shapes = f"q has shape {shape_text(q)}, k {shape_text(k)}"
    if q.dim() != k.dim() or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        raise UserError(shapes, "pass [..., heads, tokens, width] with equal widths and leading dimensions")
    heads, groups = (q.shape[-3], k.shape[-3]) if q.dim() > 2 else (1, 1)
    if heads != groups and (not groups or heads % groups):
        raise UserError(
            f"{shapes}: {heads} query heads, {groups} key heads", "make the query heads a multiple of the key heads"
        )
    return q.shape[:-3].numel() if q.dim() > 2 else 1, heads, groups


def attention_scale(scale: float | None, width: int) -> float:
    return (1 / math.sqrt(width) if width else 1.0) if scale is None else number("scale", scale)


def attention_mask(call: Call, mask: Any, queries: Operand, many: int) -> Operand:
    """Reshape the mask to [B, H, T, S], where a dimension that broadcasts is 1."""
    q = queries.tensor
    operand = call.take("mask", mask, 1, (torch.bool, torch.float32))
    full_shape = torch.Size((*q.shape[:-1], many))
    mask_shape = operand.tensor.shape
    if len(mask_shape) > len(full_shape) or any(
        a not in (1, b) for a, b in zip(reversed(mask_shape), reversed(full_shape), strict=False)
    ):
        raise UserError(
            f"mask has shape {shape_text(operand.tensor)}", f"pass one that broadcasts to {list(full_shape)}"
        )
    tensor = operand.tensor.view((1,) * (max(len(full_shape), 4) - len(mask_shape)) + tuple(mask_shape))
    lead = tensor.shape[:-3]
    if len(lead) > 1:
        leading = lead if lead.numel() == 1 else torch.Size(full_shape[:-3])
        tensor = tensor.expand(*leading, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])
    return Operand("mask", tensor, operand.buffer)
