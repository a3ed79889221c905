"""Kernels as torch operators, `torch.ops.polyfleet.…`, which support gradients, torch.compile and autocast.

    from workers.kernels.dispatch import operators
    y = operators.rmsnorm(x, weight, kernels="triton")

The functions here accept torch tensors on any device that the kernels support; `kernels` is the name of an
implementation, or "auto" (see kernel_choice.py). "torch" calls torch's own functions, which a compiler can fuse; any
other is one opaque operator. Gradients of gradients raise UserError. Under autocast, the operators use the same dtypes
as torch's functions of the same names.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from workers.kernels import sdpa
from workers.kernels.dispatch import definition
from workers.kernels.dispatch.definition import can_call_directly, is_plain, kernels_of, needs_gradients
from workers.kernels.formulas import rotated

OPS = definition.define_operators()


def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    round_before_weight: bool = False,
    kernels: str = "auto",
) -> Tensor:
    """See KernelBackend.rmsnorm: rows of x [..., C], weight [C]."""
    if kernels == "torch" and not offset and not round_before_weight:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    if can_call_directly(x, weight):
        output: Tensor = kernels_of(kernels, x.device).rmsnorm(
            x, weight, eps, offset=offset, round_before_weight=round_before_weight
        )
        return output
    result: Tensor = OPS.rmsnorm(x, weight, eps, offset, round_before_weight, kernels)
    return result


def layernorm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, kernels: str = "auto"
) -> Tensor:
    """See KernelBackend.layernorm: rows of x [..., C], weight and bias [C]."""
    if kernels == "torch":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if can_call_directly(x, weight, bias):
        output: Tensor = kernels_of(kernels, x.device).layernorm(x, weight, bias, eps)
        return output
    result: Tensor = OPS.layernorm(x, weight, bias, eps, kernels)
    return result


def softmax(x: Tensor, *, kernels: str = "auto") -> Tensor:
    """See KernelBackend.softmax: over the last dimension."""
    if kernels == "torch":
        return x.softmax(-1)
    if can_call_directly(x):
        output: Tensor = kernels_of(kernels, x.device).softmax(x)
        return output
    result: Tensor = OPS.softmax(x, kernels)
    return result


def silu(x: Tensor, *, kernels: str = "auto") -> Tensor:
    """See KernelBackend.silu."""
    if kernels == "torch":
        return F.silu(x)
    if can_call_directly(x):
        output: Tensor = kernels_of(kernels, x.device).silu(x)
        return output
    result: Tensor = OPS.silu(x, kernels)
    return result


def swiglu(gate: Tensor, up: Tensor, *, kernels: str = "auto") -> Tensor:
    """See KernelBackend.swiglu: two tensors of one shape."""
    if kernels == "torch":
        return F.silu(gate) * up
    if can_call_directly(gate, up):
        output: Tensor = kernels_of(kernels, gate.device).swiglu(gate, up)
        return output
    result: Tensor = OPS.swiglu(gate, up, kernels)
    return result


def apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, position: int = 0, layout: str = "halves", kernels: str = "auto"
) -> Tensor:
    """See KernelBackend.apply_rope: x [..., T, D], cos and sin [positions, pairs]. The tables have no gradient."""
    if kernels == "torch":
        return rotated(
            x, cos[position : position + x.shape[-2]], sin[position : position + x.shape[-2]], layout == "pairs"
        )
    if can_call_directly(x, cos, sin):
        output: Tensor = kernels_of(kernels, x.device).apply_rope(x, cos, sin, position=position, layout=layout)
        return output
    result: Tensor = OPS.apply_rope(x, cos, sin, position, layout, kernels)
    return result


def matmul(a: Tensor, b: Tensor, *, kernels: str = "auto") -> Tensor:
    """See KernelBackend.matmul: a [..., M, K] times b [..., K, N]."""
    if kernels == "torch":
        return torch.matmul(a, b)
    if can_call_directly(a, b):
        output: Tensor = kernels_of(kernels, a.device).matmul(a, b)
        return output
    result: Tensor = OPS.matmul(a, b, kernels)
    return result


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    kernels: str = "auto",
) -> Tensor:
    """See KernelBackend.attention: q [..., H, T, D], k and v [..., G, S, ·]; `causal` counts from the end.

    An additive mask has a gradient only where torch's function computes the attention.
    """
    variant = _torch_variant(kernels, q, k, v)
    if variant is not None:
        with sdpa.prefer(variant):
            return sdpa.attention(q, k, v, mask, scale, causal)
    if can_call_directly(q, k, v, mask):
        output: Tensor = kernels_of(kernels, q.device).attention(q, k, v, scale=scale, mask=mask, causal=causal)
        return output
    with_lse = needs_gradients(q, k, v)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    result: Tensor = OPS.attention(q, k, v, mask, factor, causal, with_lse, kernels)[0]
    return result


def _torch_variant(kernels: str, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return the kernel to prefer (or "") if torch's own function, which has gradients, computes this attention.

    A trace has no measurements: there "torch" leaves the choice to torch, and "auto" is one opaque operator.
    """
    name, _, variant = kernels.partition(":")
    if name not in ("torch", "auto") or q.dim() != 4:
        return None
    if not is_plain(q):
        return variant if name == "torch" else None
    training = needs_gradients(q, k, v)
    if name == "auto" and not training:
        return None
    device = q.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
    chosen: str | None = kernels_of(kernels, q.device).attention_variant(q, k, dtype, training)
    return chosen
