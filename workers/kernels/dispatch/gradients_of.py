"""Autograd of the operators: what each call saves, and its gradients, computed by operators that can be traced."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cluster.errors import UserError


def _ops() -> Any:
    return torch.ops.polyfleet


def _or_none(has_gradient: bool, grad: Tensor) -> Tensor | None:
    return grad if has_gradient else None


def _keep_rmsnorm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, ctx.eps, ctx.offset, _, ctx.kernels = inputs
    ctx.save_for_backward(x, weight)


def _rmsnorm(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    grads = _ops().rmsnorm_backward(grad, x, weight, ctx.eps, ctx.offset, ctx.kernels)
    return grads[0], _or_none(weight is not None, grads[1]), None, None, None, None


def _keep_layernorm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, ctx.eps, ctx.kernels = inputs
    ctx.save_for_backward(x, weight, bias)


def _layernorm(ctx: Any, grad: Tensor) -> Any:
    x, weight, bias = ctx.saved_tensors
    grads = _ops().layernorm_backward(grad, x, weight, bias, ctx.eps, ctx.kernels)
    return grads[0], _or_none(weight is not None, grads[1]), _or_none(bias is not None, grads[2]), None, None


def _keep_softmax(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.kernels = inputs[-1]
    ctx.save_for_backward(output)


def _softmax(ctx: Any, grad: Tensor) -> Any:
    return _ops().softmax_backward(grad, ctx.saved_tensors[0], ctx.kernels), None


def _keep_silu(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.kernels = inputs
    ctx.save_for_backward(x)


def _silu(ctx: Any, grad: Tensor) -> Any:
    return _ops().silu_backward(grad, ctx.saved_tensors[0], ctx.kernels), None


def _keep_swiglu(ctx: Any, inputs: Any, output: Any) -> None:
    gate, up, ctx.kernels = inputs
    ctx.save_for_backward(gate, up)


def _swiglu(ctx: Any, grad: Tensor) -> Any:
    grads = _ops().swiglu_backward(grad, *ctx.saved_tensors, ctx.kernels)
    return grads[0], grads[1], None


def _keep_rope(ctx: Any, inputs: Any, output: Any) -> None:
    _, cos, sin, ctx.position, ctx.layout, ctx.kernels = inputs
    ctx.save_for_backward(cos, sin)


def _rope(ctx: Any, grad: Tensor) -> Any:
    if any(ctx.needs_input_grad[1:3]):
        raise UserError("the tables of apply_rope have no gradient", "detach cos and sin, or use kernels='torch'")
    cos, sin = ctx.saved_tensors
    grad_x = _ops().apply_rope_backward(grad, cos, sin, ctx.position, ctx.layout, ctx.kernels)
    return grad_x, None, None, None, None, None


def _keep_matmul(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, ctx.kernels = inputs
    ctx.save_for_backward(a, b)


def _matmul(ctx: Any, grad: Tensor) -> Any:
    a, b = ctx.saved_tensors
    grads = _ops().matmul_backward(grad, a, b, ctx.kernels)
    return grads[0], grads[1], None


def _keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, ctx.scale, ctx.causal, ctx.with_lse, ctx.kernels = inputs
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _attention(ctx: Any, grad: Tensor | None, _: Any) -> Any:
    if not ctx.with_lse:
        raise UserError("attention was called without the sums that its gradient needs", "pass with_lse=True")
    if ctx.needs_input_grad[3]:
        raise UserError("the mask of attention has no gradient", "detach it, or use kernels='torch'")
    q, k, v, mask, out, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * 8
    grads = _ops().attention_backward(grad, q, k, v, out, lse, mask, ctx.scale, ctx.causal, ctx.kernels)
    return grads[0], grads[1], grads[2], None, None, None, None, None


TABLE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rmsnorm": (_rmsnorm, _keep_rmsnorm),
    "layernorm": (_layernorm, _keep_layernorm),
    "softmax": (_softmax, _keep_softmax),
    "silu": (_silu, _keep_silu),
    "swiglu": (_swiglu, _keep_swiglu),
    "apply_rope": (_rope, _keep_rope),
    "matmul": (_matmul, _keep_matmul),
    "attention": (_attention, _keep_attention),
}
