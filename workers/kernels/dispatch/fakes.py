"""Fake implementations of the operators for tracing: results have shapes and dtypes, and nothing is computed."""

from typing import Any

import torch
from torch import Tensor

Optional = Tensor | None


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _or_none(x: Tensor, of: Optional) -> Tensor:
    return x.new_empty(0) if of is None else _like(of)


def rmsnorm(x: Tensor, weight: Optional, eps: float, offset: float, round_before_weight: bool, kernels: str) -> Tensor:
    return _like(x)


def rmsnorm_backward(grad: Tensor, x: Tensor, weight: Optional, eps: float, offset: float, kernels: str) -> Any:
    return _like(x), _or_none(x, weight)


def layernorm(x: Tensor, weight: Optional, bias: Optional, eps: float, kernels: str) -> Tensor:
    return _like(x)


def layernorm_backward(grad: Tensor, x: Tensor, weight: Optional, bias: Optional, eps: float, kernels: str) -> Any:
    return _like(x), _or_none(x, weight), _or_none(x, bias)


def softmax(x: Tensor, kernels: str) -> Tensor:
    return _like(x)


def softmax_backward(grad: Tensor, y: Tensor, kernels: str) -> Tensor:
    return _like(y)


def silu(x: Tensor, kernels: str) -> Tensor:
    return _like(x)


def silu_backward(grad: Tensor, x: Tensor, kernels: str) -> Tensor:
    return _like(x)


def swiglu(gate: Tensor, up: Tensor, kernels: str) -> Tensor:
    return _like(gate)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, kernels: str) -> Any:
    return _like(gate), _like(up)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, position: int, layout: str, kernels: str) -> Tensor:
    return _like(x)


def apply_rope_backward(grad: Tensor, cos: Tensor, sin: Tensor, position: int, layout: str, kernels: str) -> Tensor:
    return _like(grad)


def matmul(a: Tensor, b: Tensor, kernels: str) -> Tensor:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]))


def matmul_backward(grad: Tensor, a: Tensor, b: Tensor, kernels: str) -> Any:
    return _like(a), _like(b)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional, scale: float, causal: bool, with_lse: bool, kernels: str
) -> Any:
    lse = q.new_empty(q.shape[:-1] if with_lse else (0,), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Optional,
    scale: float,
    causal: bool,
    kernels: str,
) -> Any:
    return _like(q), _like(k), _like(v)
