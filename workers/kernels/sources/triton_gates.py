"""Gates with their gradients, and rotary embedding. One source for NVIDIA, AMD and Intel; imported on first use.

Gates see N values in a row, whatever their shape. Rotation sees R = B · T tokens of D values, of which P pairs turn.
"""

import triton
import triton.language as tl


@triton.jit
def _values(N, BLOCK: tl.constexpr):
    """Where the values of a program lie, and which of them there are."""
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at < N


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _slope(x):
    """The derivative of x · sigmoid(x); of an infinite x its limit, where 0 · inf would be NaN."""
    share = _sigmoid(x)
    return tl.where(tl.abs(x) == float("inf"), share, share * (1.0 + x * (1.0 - share)))


@triton.jit
def silu(x, out, N, BLOCK: tl.constexpr):
    at, seen = _values(N, BLOCK)
    x_N = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
    tl.store(out + at, (x_N / (1.0 + tl.exp(-x_N))).to(out.dtype.element_ty), mask=seen)


@triton.jit
def swiglu(gate, up, out, N, BLOCK: tl.constexpr):
    at, seen = _values(N, BLOCK)
    gate_N = tl.load(gate + at, mask=seen, other=0.0).to(tl.float32)
    up_N = tl.load(up + at, mask=seen, other=0.0).to(tl.float32)
    tl.store(out + at, (gate_N / (1.0 + tl.exp(-gate_N)) * up_N).to(out.dtype.element_ty), mask=seen)


@triton.jit
def silu_backward(g, x, grad, N, BLOCK: tl.constexpr):
    at, seen = _values(N, BLOCK)
    g_N = tl.load(g + at, mask=seen, other=0.0).to(tl.float32)
    x_N = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
    tl.store(grad + at, (g_N * _slope(x_N)).to(grad.dtype.element_ty), mask=seen)


@triton.jit
def swiglu_backward(g, gate, up, grad_gate, grad_up, N, BLOCK: tl.constexpr):
    at, seen = _values(N, BLOCK)
    g_N = tl.load(g + at, mask=seen, other=0.0).to(tl.float32)
    gate_N = tl.load(gate + at, mask=seen, other=0.0).to(tl.float32)
    up_N = tl.load(up + at, mask=seen, other=0.0).to(tl.float32)
    tl.store(grad_gate + at, (g_N * up_N * _slope(gate_N)).to(grad_gate.dtype.element_ty), mask=seen)
    tl.store(grad_up + at, (g_N * gate_N * _sigmoid(gate_N)).to(grad_up.dtype.element_ty), mask=seen)


@triton.jit
def rope(
    x,
    cos,
    sin,
    out,
    R,
    T,
    D,
    P,
    position,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """`PAIRS`: value 2i turns with 2i + 1, else i with i + P. `REST`: whether values from 2P on are to be copied."""
    rows = tl.cast(tl.program_id(0), tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = rows[:, None] * D
    table = (position + rows % T)[:, None] * P
    for start in range(0, P, BLOCK_P):
        pairs = start + tl.arange(0, BLOCK_P)
        seen = (rows < R)[:, None] & (pairs < P)[None, :]
        cos_RP = tl.load(cos + table + pairs[None, :], mask=seen, other=0.0).to(tl.float32)
        sin_RP = tl.load(sin + table + pairs[None, :], mask=seen, other=0.0).to(tl.float32)
        if PAIRS:
            both = 2 * start + tl.arange(0, 2 * BLOCK_P)
            seen_both = (rows < R)[:, None] & (both < 2 * P)[None, :]
            x_RPP = tl.load(x + at + both[None, :], mask=seen_both, other=0.0).to(tl.float32)
            first_RP, second_RP = tl.split(tl.reshape(x_RPP, [BLOCK_R, BLOCK_P, 2]))
            turned = tl.join(first_RP * cos_RP - second_RP * sin_RP, second_RP * cos_RP + first_RP * sin_RP)
            turned = tl.reshape(turned, [BLOCK_R, 2 * BLOCK_P])
            tl.store(out + at + both[None, :], turned.to(out.dtype.element_ty), mask=seen_both)
        else:
            first_RP = tl.load(x + at + pairs[None, :], mask=seen, other=0.0).to(tl.float32)
            second_RP = tl.load(x + at + P + pairs[None, :], mask=seen, other=0.0).to(tl.float32)
            turned = first_RP * cos_RP - second_RP * sin_RP
            tl.store(out + at + pairs[None, :], turned.to(out.dtype.element_ty), mask=seen)
            turned = second_RP * cos_RP + first_RP * sin_RP
            tl.store(out + at + P + pairs[None, :], turned.to(out.dtype.element_ty), mask=seen)
    if REST:
        for start in range(2 * P, D, BLOCK_P):
            columns = start + tl.arange(0, BLOCK_P)
            seen = (rows < R)[:, None] & (columns < D)[None, :]
            tl.store(out + at + columns[None, :], tl.load(x + at + columns[None, :], mask=seen), mask=seen)
