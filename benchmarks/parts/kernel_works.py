"""What benchmarks/kernels.py measures: an operation of one shape as users write it, and as the kernels have it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Arrays = tuple[Tensor, ...]


@dataclass(frozen=True)
class Work:
    """`eager` and `ours` take the arrays; `ours` takes the kernels first. `grads` tells how many of the first arrays
    have a gradient, `moved` how many arrays of the first one's size are read and written at least.
    """

    eager: Callable[..., Tensor]
    ours: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    grads: int = 1
    moved: int = 2
    moved_backward: int = 3


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers' models have it: tables as wide as a head."""
    first, second = x.chunk(2, -1)
    return x * torch.cat((cos, cos), -1) + torch.cat((-second, first), -1) * torch.cat((sin, sin), -1)


ROWS = {
    "rmsnorm": Work(
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
        lambda k, x, w: k.rmsnorm(x, w, 1e-6),
        lambda k, g, x, w: k.rmsnorm_backward(g, x, w, 1e-6),
        grads=2,
    ),
    "layernorm": Work(
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5),
        lambda k, x, w, b: k.layernorm(x, w, b, 1e-5),
        lambda k, g, x, w, b: k.layernorm_backward(g, x, w, b, 1e-5),
        grads=3,
    ),
    "softmax": Work(lambda x: x.softmax(-1), lambda k, x: k.softmax(x), lambda k, g, y: k.softmax_backward(g, y)),
    "silu": Work(F.silu, lambda k, x: k.silu(x), lambda k, g, x: k.silu_backward(g, x)),
    "swiglu": Work(
        lambda gate, up: F.silu(gate) * up,
        lambda k, gate, up: k.swiglu(gate, up),
        lambda k, g, gate, up: k.swiglu_backward(g, gate, up),
        grads=2,
        moved=3,
        moved_backward=5,
    ),
    "rope": Work(_rope, lambda k, x, cos, sin: k.apply_rope(x, cos, sin)),
}
PRODUCTS = {
    "matmul": Work(torch.matmul, lambda k, a, b: k.matmul(a, b)),
    "linear": Work(lambda a, b: a @ b.mT, lambda k, a, b: k.matmul(a, b.mT)),
    "matmul_vec": Work(lambda a, x: a @ x, lambda k, a, x: k.matmul_vec(a, x)),
    "weighted_sum_rows": Work(lambda w, rows: w @ rows, lambda k, w, rows: k.weighted_sum_rows(w, rows)),
}
ATTENTION = {
    "attention": Work(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]),
        lambda kernels, q, k, v: kernels.attention(q, k, v),
    ),
    "causal": Work(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]),
        lambda kernels, q, k, v: kernels.attention(q, k, v, causal=True),
    ),
}
WORKS = ROWS | PRODUCTS | ATTENTION
HEAD = 128


def arrays(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Arrays:
    """Of an operation on rows, `shape` is rows and columns; of a product M, K, N; of attention B, H, G, T, S, D."""

    def some(*size: int) -> Tensor:
        return torch.randn(size, device=device).to(dtype)

    if name in ATTENTION:
        batch, heads, groups, asked, kept, width = shape
        return some(batch, heads, asked, width), some(batch, groups, kept, width), some(batch, groups, kept, width)
    if name in PRODUCTS:
        rows, depth, columns = shape
        return {
            "matmul": lambda: (some(rows, depth), some(depth, columns)),
            "linear": lambda: (some(rows, depth), some(columns, depth)),
            "matmul_vec": lambda: (some(rows, depth), some(depth)),
            "weighted_sum_rows": lambda: (some(rows), some(rows, columns)),
        }[name]()
    rows, columns = shape
    if name == "rope":
        width = min(HEAD, columns)
        return some(columns // width, rows, width), some(rows, width // 2), some(rows, width // 2)
    vectors = {"rmsnorm": 1, "layernorm": 2}.get(name, 0)
    more = [some(rows, columns)] if name == "swiglu" else []
    return some(rows, columns), *more, *(some(columns) for _ in range(vectors))
