"""Gradients of norms and softmax. One source for NVIDIA, AMD and Intel; imported on first use.

Programs are persistent: program p of P takes rows p, p + P, … in blocks and adds up what they give for the weight: in
registers (`…_rows`), or in its own row of `partial` (`…_loop`). `add_partials` then adds the P rows in their order.
Nothing is atomic, so that runs repeat bit for bit.
"""

import triton
import triton.language as tl


@triton.jit
def rmsnorm_backward_rows(
    g,
    x,
    weight,
    grad,
    partial,
    R,
    C,
    eps,
    offset,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.cast(tl.program_id(0), tl.int64)
    columns = tl.arange(0, BLOCK_C)
    inside = columns < C
    sums_RC = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(program * BLOCK_R, R, tl.num_programs(0) * BLOCK_R):
        rows = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_R)
        seen = (rows < R)[:, None] & inside[None, :]
        at = rows[:, None] * C + columns[None, :]
        x_RC = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
        g_RC = tl.load(g + at, mask=seen, other=0.0).to(tl.float32)
        scale_R = tl.rsqrt(tl.sum(x_RC * x_RC, 1) / C + eps)
        x_RC = x_RC * scale_R[:, None]
        if HAS_WEIGHT:
            sums_RC += g_RC * x_RC
            weight_C = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
            g_RC = g_RC * weight_C[None, :]
        g_RC = (g_RC - x_RC * (tl.sum(g_RC * x_RC, 1) / C)[:, None]) * scale_R[:, None]
        tl.store(grad + at, g_RC.to(grad.dtype.element_ty), mask=seen)
    if HAS_WEIGHT:
        tl.store(partial + program * C + columns, tl.sum(sums_RC, 0), mask=inside)


@triton.jit
def rmsnorm_backward_loop(
    g,
    x,
    weight,
    grad,
    partial,
    R,
    C,
    eps,
    offset,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.cast(tl.program_id(0), tl.int64)
    own = partial + program * C
    step = tl.num_programs(0) * BLOCK_R
    for first in range(program * BLOCK_R, R, step):
        rows = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_R)
        squares = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        products = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for start in range(0, C, BLOCK_C):
            columns = start + tl.arange(0, BLOCK_C)
            seen = (rows < R)[:, None] & (columns < C)[None, :]
            at = rows[:, None] * C + columns[None, :]
            x_RC = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
            g_RC = tl.load(g + at, mask=seen, other=0.0).to(tl.float32)
            if HAS_WEIGHT:
                weight_C = tl.load(weight + columns, mask=columns < C, other=0.0).to(tl.float32) + offset
                g_RC = g_RC * weight_C[None, :]
            squares += x_RC * x_RC
            products += g_RC * x_RC
        scale_R = tl.rsqrt(tl.sum(squares, 1) / C + eps)
        slope_R = tl.sum(products, 1) * scale_R / C
        for start in range(0, C, BLOCK_C):
            columns = start + tl.arange(0, BLOCK_C)
            seen = (rows < R)[:, None] & (columns < C)[None, :]
            at = rows[:, None] * C + columns[None, :]
            x_RC = tl.load(x + at, mask=seen, other=0.0).to(tl.float32) * scale_R[:, None]
            g_RC = tl.load(g + at, mask=seen, other=0.0).to(tl.float32)
            if HAS_WEIGHT:
                had = tl.load(own + columns, mask=(columns < C) & (first >= step), other=0.0)
                tl.store(own + columns, had + tl.sum(g_RC * x_RC, 0), mask=columns < C)
                weight_C = tl.load(weight + columns, mask=columns < C, other=0.0).to(tl.float32) + offset
                g_RC = g_RC * weight_C[None, :]
            g_RC = (g_RC - x_RC * slope_R[:, None]) * scale_R[:, None]
            tl.store(grad + at, g_RC.to(grad.dtype.element_ty), mask=seen)
        tl.debug_barrier()


@triton.jit
def layernorm_backward_rows(
    g,
    x,
    weight,
    grad,
    partial,
    R,
    C,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """`partial` [2, P, C]: of the weight, then of the bias."""
    program = tl.cast(tl.program_id(0), tl.int64)
    columns = tl.arange(0, BLOCK_C)
    inside = columns < C
    sums_RC = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    plain_RC = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(program * BLOCK_R, R, tl.num_programs(0) * BLOCK_R):
        rows = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_R)
        seen = (rows < R)[:, None] & inside[None, :]
        at = rows[:, None] * C + columns[None, :]
        x_RC = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
        g_RC = tl.load(g + at, mask=seen, other=0.0).to(tl.float32)
        x_RC = tl.where(seen, x_RC - (tl.sum(x_RC, 1) / C)[:, None], 0.0)
        scale_R = tl.rsqrt(tl.sum(x_RC * x_RC, 1) / C + eps)
        x_RC = x_RC * scale_R[:, None]
        if HAS_BIAS:
            plain_RC += g_RC
        if HAS_WEIGHT:
            sums_RC += g_RC * x_RC
            g_RC = g_RC * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        slope_R = tl.sum(g_RC * x_RC, 1) / C
        g_RC = (g_RC - (tl.sum(g_RC, 1) / C)[:, None] - x_RC * slope_R[:, None]) * scale_R[:, None]
        tl.store(grad + at, g_RC.to(grad.dtype.element_ty), mask=seen)
    if HAS_WEIGHT:
        tl.store(partial + program * C + columns, tl.sum(sums_RC, 0), mask=inside)
    if HAS_BIAS:
        tl.store(partial + (tl.num_programs(0) + program) * C + columns, tl.sum(plain_RC, 0), mask=inside)


@triton.jit
def layernorm_backward_loop(
    g,
    x,
    weight,
    grad,
    partial,
    R,
    C,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Mean, variance and covariance with the gradient in one reading, lane by lane (Welford), put together at the end
    (Chan): a mean far from 0 costs no digits.
    """
    program = tl.cast(tl.program_id(0), tl.int64)
    own = partial + program * C
    own_plain = partial + (tl.num_programs(0) + program) * C
    step = tl.num_programs(0) * BLOCK_R
    lanes = tl.arange(0, BLOCK_C)
    counts = ((C - lanes + BLOCK_C - 1) // BLOCK_C).to(tl.float32)[None, :]
    for first in range(program * BLOCK_R, R, step):
        rows = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_R)
        means = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        slopes = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        squares = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        products = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for start in range(0, C, BLOCK_C):
            columns = start + lanes
            seen = (rows < R)[:, None] & (columns < C)[None, :]
            at = rows[:, None] * C + columns[None, :]
            x_RC = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
            g_RC = tl.load(g + at, mask=seen, other=0.0).to(tl.float32)
            if HAS_WEIGHT:
                g_RC = g_RC * tl.load(weight + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
            away = tl.where(seen, x_RC - means, 0.0)
            turned = tl.where(seen, g_RC - slopes, 0.0)
            nth = start // BLOCK_C + 1
            means += away / nth
            slopes += turned / nth
            rest = tl.where(seen, x_RC - means, 0.0)
            squares += away * rest
            products += turned * rest
        mean_R = tl.sum(means * counts, 1) / C
        slope_R = tl.sum(slopes * counts, 1) / C
        means = means - mean_R[:, None]
        scale_R = tl.rsqrt(tl.sum(squares + counts * means * means, 1) / C + eps)
        across_R = tl.sum(products + counts * means * (slopes - slope_R[:, None]), 1) * scale_R / C
        for start in range(0, C, BLOCK_C):
            columns = start + lanes
            seen = (rows < R)[:, None] & (columns < C)[None, :]
            at = rows[:, None] * C + columns[None, :]
            x_RC = (tl.load(x + at, mask=seen, other=0.0).to(tl.float32) - mean_R[:, None]) * scale_R[:, None]
            g_RC = tl.load(g + at, mask=seen, other=0.0).to(tl.float32)
            more = (columns < C) & (first >= step)
            if HAS_BIAS:
                had = tl.load(own_plain + columns, mask=more, other=0.0)
                tl.store(own_plain + columns, had + tl.sum(g_RC, 0), mask=columns < C)
            if HAS_WEIGHT:
                had = tl.load(own + columns, mask=more, other=0.0)
                tl.store(own + columns, had + tl.sum(g_RC * x_RC, 0), mask=columns < C)
                g_RC = g_RC * tl.load(weight + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
            g_RC = (g_RC - slope_R[:, None] - x_RC * across_R[:, None]) * scale_R[:, None]
            tl.store(grad + at, g_RC.to(grad.dtype.element_ty), mask=seen)
        tl.debug_barrier()


@triton.jit
def add_partials(partial, out, P, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """out[n, c] = Σ_p partial[n, p, c], where n is the second index of the program."""
    columns = tl.cast(tl.program_id(0), tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    which = tl.cast(tl.program_id(1), tl.int64)
    sums = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(0, P, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        at = (which * P + rows)[:, None] * C + columns[None, :]
        sums += tl.load(partial + at, mask=(rows < P)[:, None] & (columns < C)[None, :], other=0.0)
    tl.store(out + which * C + columns, tl.sum(sums, 0).to(out.dtype.element_ty), mask=columns < C)


@triton.jit
def softmax_backward_rows(g, y, grad, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    rows = tl.cast(tl.program_id(0), tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_C)
    seen = (rows < R)[:, None] & (columns < C)[None, :]
    at = rows[:, None] * C + columns[None, :]
    g_RC = tl.load(g + at, mask=seen, other=0.0).to(tl.float32)
    y_RC = tl.load(y + at, mask=seen, other=0.0).to(tl.float32)
    x_RC = y_RC * (g_RC - tl.sum(g_RC * y_RC, 1)[:, None])
    tl.store(grad + at, x_RC.to(grad.dtype.element_ty), mask=seen)


@triton.jit
def softmax_backward_loop(g, y, grad, R, C, BLOCK_C: tl.constexpr):
    row = tl.cast(tl.program_id(0), tl.int64) * C
    sums = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, C, BLOCK_C):
        columns = start + tl.arange(0, BLOCK_C)
        g_C = tl.load(g + row + columns, mask=columns < C, other=0.0).to(tl.float32)
        sums += g_C * tl.load(y + row + columns, mask=columns < C, other=0.0).to(tl.float32)
    total = tl.sum(sums, 0)
    for start in range(0, C, BLOCK_C):
        columns = start + tl.arange(0, BLOCK_C)
        g_C = tl.load(g + row + columns, mask=columns < C, other=0.0).to(tl.float32)
        y_C = tl.load(y + row + columns, mask=columns < C, other=0.0).to(tl.float32)
        tl.store(grad + row + columns, (y_C * (g_C - total)).to(grad.dtype.element_ty), mask=columns < C)
