"""Attention. Letters of shapes: B batch (all leading dimensions), H heads that ask, G heads that are kept, T tokens
that ask, S tokens that are kept, D width of a head, E width of a value.
"""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from cluster.errors import UserError
from workers.kernels.parts.arrays import Operand
from workers.kernels.parts.calls import Call, shape_told
from workers.kernels.parts.checks import number
from workers.kernels.parts.device import Device


class Attention(Device):
    """Where G < H, each kept head serves H / G that ask, in their order (grouped queries). Raise as Rows."""

    def compute_attention_scores(self, q: Any, k: Any, *, scale: float | None = None, out: Any = None) -> Any:
        """q [B…, H, T, D] times the transpose of k [B…, G, S, D], times `scale` (None: 1 / √D): [B…, H, T, S]. Arrays
        without heads, [T, D] and [S, D], are one head.
        """
        call = Call(self)
        asked, kept = call.take("q", q, 2), call.take("k", k, 2)
        batch, heads, groups = heads_of(asked, kept)
        (length, width), many = asked.tensor.shape[-2:], kept.tensor.shape[-2]
        filled = call.output(out, (*asked.tensor.shape[:-1], many))
        factor = attention_scale(scale, width)
        if filled.tensor.numel():
            array_q = call.array(asked, (batch, heads, length, width))
            array_k = call.array(kept, (batch, groups, many, width))
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

        `mask` broadcasts to [B…, H, T, S]: bool, True where a token is seen, or added, in q's dtype or float32.
        `causal` counts from the end: token t sees s ≤ t + S - T, as a decoder with a cache wants it (torch's
        `is_causal` counts from the beginning). A token that sees nothing gets zeros. `return_lse` adds the logarithm
        of the sum of the exponentials, float32 [B…, H, T]: -inf where nothing is seen.
        """
        call = Call(self)
        asked, kept, values = call.take("q", q, 2), call.take("k", k, 2), call.take("v", v, 2)
        batch, heads, groups = heads_of(asked, kept)
        if values.tensor.shape[:-1] != kept.tensor.shape[:-1]:
            told = f"k has shape {shape_told(kept.tensor)}, v {shape_told(values.tensor)}"
            raise UserError(told, "all but their last dimensions must be equal")
        (length, width), (many, wide) = asked.tensor.shape[-2:], values.tensor.shape[-2:]
        shown = attention_mask(call, mask, asked, many) if mask is not None else None
        filled = call.output(out, (*asked.tensor.shape[:-1], wide))
        sums = call.output(None, asked.tensor.shape[:-1], dtype=torch.float32) if return_lse else None
        factor = attention_scale(scale, width)
        if filled.tensor.numel():
            arrays = (
                call.array(asked, (batch, heads, length, width)),
                call.array(kept, (batch, groups, many, width)),
                call.array(values, (batch, groups, many, wide)),
                None if shown is None else call.array(shown, shown.tensor.shape),
                call.written(filled, (batch, heads, length, wide)),
                call.written(sums, (batch, heads, length)) if sums else None,
            )
            call.run(self._attention, *arrays, factor, bool(causal))
        result = call.result(filled)
        return (result, sums.returned(sums.tensor)) if sums else result

    # Hooks: contiguous arrays; no dimension of `out` is 0, but S and D may be. They fill `out`.

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
        """`mask_BHTS` may be None; each of its dimensions is that of the letter, or 1 and serves all. It is bool,
        float32, or in q's dtype. `lse_BHT` may be None.
        """


def heads_of(asked: Operand, kept: Operand) -> tuple[int, int, int]:
    """(batch, heads that ask, heads kept). Raises UserError where they do not fit."""
    q, k = asked.tensor, kept.tensor
    told = f"q has shape {shape_told(q)}, k {shape_told(k)}"
    if q.dim() != k.dim() or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        raise UserError(told, "give [..., heads, tokens, width] with equal widths and leading dimensions")
    heads, groups = (q.shape[-3], k.shape[-3]) if q.dim() > 2 else (1, 1)
    if heads != groups and (not groups or heads % groups):
        raise UserError(f"{told}: {heads} heads ask {groups}", "the number that ask must be a multiple of those kept")
    return q.shape[:-3].numel() if q.dim() > 2 else 1, heads, groups


def attention_scale(scale: float | None, width: int) -> float:
    return (1 / math.sqrt(width) if width else 1.0) if scale is None else number("scale", scale)


def attention_mask(call: Call, mask: Any, asked: Operand, many: int) -> Operand:
    """As [B, H, T, S], where a dimension that serves all may be 1."""
    q = asked.tensor
    one = call.take("mask", mask, 1, (torch.bool, torch.float32))
    whole = torch.Size((*q.shape[:-1], many))
    given = one.tensor.shape
    if len(given) > len(whole) or any(a not in (1, b) for a, b in zip(reversed(given), reversed(whole), strict=False)):
        raise UserError(f"mask has shape {shape_told(one.tensor)}", f"give one that broadcasts to {list(whole)}")
    tensor = one.tensor.view((1,) * (max(len(whole), 4) - len(given)) + tuple(given))
    lead = tensor.shape[:-3]
    if len(lead) > 1:
        spread = lead if lead.numel() == 1 else torch.Size(whole[:-3])
        tensor = tensor.expand(*spread, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])
    return Operand("mask", tensor, one.buffer)
