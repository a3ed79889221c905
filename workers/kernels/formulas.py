"""Gradients in torch, in at least float32: correct on every device of torch, and the reference for faster ones.

Letters as in rows.py and attention.py; `g` is the gradient of the result.
"""

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def rmsnorm(
    g_RC: Tensor, x_RC: Tensor, weight_C: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None]:
    g, x = wide(g_RC), wide(x_RC)
    scale_R1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * scale_R1
    grad_weight = None
    if weight_C is not None:
        grad_weight = (g * normed).sum(0)
        g = g * (wide(weight_C) + offset)
    grad = (g - normed * (g * normed).mean(-1, keepdim=True)) * scale_R1
    return grad.to(x_RC.dtype), grad_weight


def layernorm(
    g_RC: Tensor, x_RC: Tensor, weight_C: Tensor | None, with_bias: bool, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    g, x = wide(g_RC), wide(x_RC)
    centred = x - x.mean(-1, keepdim=True)
    scale_R1 = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normed = centred * scale_R1
    grad_bias = g.sum(0) if with_bias else None
    grad_weight = None
    if weight_C is not None:
        grad_weight = (g * normed).sum(0)
        g = g * wide(weight_C)
    grad = (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)) * scale_R1
    return grad.to(x_RC.dtype), grad_weight, grad_bias


def softmax(g_RC: Tensor, y_RC: Tensor) -> Tensor:
    g, y = wide(g_RC), wide(y_RC)
    return (y * (g - (g * y).sum(-1, keepdim=True))).to(y_RC.dtype)


def silu(g_RC: Tensor, x_RC: Tensor) -> Tensor:
    return (wide(g_RC) * silu_slope(wide(x_RC))).to(x_RC.dtype)


def silu_slope(x: Tensor) -> Tensor:
    """The derivative of x · sigmoid(x); 0 for -inf and 1 for inf, where x · (1 - sigmoid(x)) alone would be NaN."""
    share = torch.sigmoid(x)
    return torch.where(x.isinf(), share, share * (1 + x * (1 - share)))


def swiglu(g_RC: Tensor, gate_RC: Tensor, up_RC: Tensor) -> tuple[Tensor, Tensor]:
    g, gate, up = wide(g_RC), wide(gate_RC), wide(up_RC)
    grad_gate = g * up * silu_slope(gate)
    return grad_gate.to(gate_RC.dtype), (g * gate * torch.sigmoid(gate)).to(up_RC.dtype)


def attention(
    g_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    mask_BHTS: Tensor | None,
    out_BHTE: Tensor,
    lse_BHT: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. The weights are recomputed from `lse_BHT`, one key head at a time, so that only
    [B, H / G, T, S] values are in memory at once.
    """
    groups = k_BGSD.shape[1]
    per = q_BHTD.shape[1] // groups
    grads = torch.empty_like(q_BHTD), torch.empty_like(k_BGSD), torch.empty_like(v_BGSE)
    delta_BHT = (wide(g_BHTE) * wide(out_BHTE)).sum(-1)
    for group in range(groups):
        heads = slice(group * per, (group + 1) * per)
        mask = mask_BHTS if mask_BHTS is None or mask_BHTS.shape[1] == 1 else mask_BHTS[:, heads]
        queries, g = wide(q_BHTD[:, heads]), wide(g_BHTE[:, heads])
        keys, values = wide(k_BGSD[:, group, None]), wide(v_BGSE[:, group, None])
        scores = masked(queries @ keys.mT * scale, mask, causal)
        weights = (scores - lse_BHT[:, heads, :, None]).exp().masked_fill_(scores == -torch.inf, 0.0)
        score_grads = weights * (g @ values.mT - delta_BHT[:, heads, :, None]) * scale
        grads[0][:, heads] = score_grads @ keys
        grads[1][:, group] = (score_grads.mT @ queries).sum(1)
        grads[2][:, group] = (weights.mT @ g).sum(1)
    return grads


def rotated(x_BTD: Tensor, cos_TP: Tensor, sin_TP: Tensor, pairs: bool) -> Tensor:
    """Rotary position embedding. Values beyond the first 2P do not change."""
    count = cos_TP.shape[-1]
    cos, sin, rotating = wide(cos_TP), wide(sin_TP), wide(x_BTD[..., : 2 * count])
    first, second = (rotating[..., ::2], rotating[..., 1::2]) if pairs else rotating.chunk(2, -1)
    halves = (first * cos - second * sin, second * cos + first * sin)
    result = torch.stack(halves, -1).flatten(-2) if pairs else torch.cat(halves, -1)
    result = result.to(x_BTD.dtype)
    return result if 2 * count == x_BTD.shape[-1] else torch.cat((result, x_BTD[..., 2 * count :]), -1)


def masked(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Set scores of invisible tokens to -inf; `causal` counts from the end."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        query_tokens, key_tokens = scores.shape[-2:]
        visible = torch.ones(query_tokens, key_tokens, dtype=torch.bool, device=scores.device).tril(
            key_tokens - query_tokens
        )
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores
