"""Rows so wide that a cluster of programs shares one: norms and softmax, from Triton 3.8 on NVIDIA's sm_90 and newer.

The compiler splits a row over the programs (`num_ctas`) and adds up across them in shared memory (triton#9663); blocks
of two dimensions it refuses. One reading and one writing of memory, where a loop would read twice. Imported on first
use.
"""

import triton
import triton.language as tl


@triton.jit
def _row(C, BLOCK_C: tl.constexpr):
    """Where the row of a cluster begins, its columns, and which of them there are."""
    columns = tl.arange(0, BLOCK_C)
    return tl.cast(tl.program_id(0), tl.int64) * C, columns, columns < C


@triton.jit
def rmsnorm_cluster(
    x, weight, out, R, C, eps, offset, HAS_WEIGHT: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_C: tl.constexpr
):
    row, columns, seen = _row(C, BLOCK_C)
    y_C = tl.load(x + row + columns, mask=seen, other=0.0).to(tl.float32)
    y_C = y_C * tl.rsqrt(tl.sum(y_C * y_C, 0) / C + eps)
    if HAS_WEIGHT:
        if ROUNDED:
            y_C = y_C.to(out.dtype.element_ty).to(tl.float32)
        y_C = y_C * (tl.load(weight + columns, mask=seen, other=0.0).to(tl.float32) + offset)
    tl.store(out + row + columns, y_C.to(out.dtype.element_ty), mask=seen)


@triton.jit
def layernorm_cluster(
    x, weight, bias, out, R, C, eps, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_C: tl.constexpr
):
    row, columns, seen = _row(C, BLOCK_C)
    y_C = tl.load(x + row + columns, mask=seen, other=0.0).to(tl.float32)
    y_C = tl.where(seen, y_C - tl.sum(y_C, 0) / C, 0.0)
    y_C = y_C * tl.rsqrt(tl.sum(y_C * y_C, 0) / C + eps)
    if HAS_WEIGHT:
        y_C = y_C * tl.load(weight + columns, mask=seen, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y_C = y_C + tl.load(bias + columns, mask=seen, other=0.0).to(tl.float32)
    tl.store(out + row + columns, y_C.to(out.dtype.element_ty), mask=seen)


@triton.jit
def softmax_cluster(x, out, R, C, BLOCK_C: tl.constexpr):
    row, columns, seen = _row(C, BLOCK_C)
    x_C = tl.load(x + row + columns, mask=seen, other=-float("inf")).to(tl.float32)
    shares_C = tl.exp(x_C - tl.max(x_C, 0))
    tl.store(out + row + columns, (shares_C / tl.sum(shares_C, 0)).to(out.dtype.element_ty), mask=seen)


@triton.jit
def softmax_backward_cluster(g, y, grad, R, C, BLOCK_C: tl.constexpr):
    row, columns, seen = _row(C, BLOCK_C)
    g_C = tl.load(g + row + columns, mask=seen, other=0.0).to(tl.float32)
    y_C = tl.load(y + row + columns, mask=seen, other=0.0).to(tl.float32)
    tl.store(grad + row + columns, (y_C * (g_C - tl.sum(g_C * y_C, 0))).to(grad.dtype.element_ty), mask=seen)
