"""RMS and layer norms, and softmax. One source for NVIDIA, AMD and Intel; imported on first use.

Letters of shapes: R rows, C columns. `…_rows` keeps BLOCK_R whole rows in registers: several, one, or one that a
cluster shares (the compiler splits it). `…_loop` reads a row twice, BLOCK_C columns at a time. Rows begin at 64-bit
offsets, every load and store is masked, and sums are in float32.
"""

import triton
import triton.language as tl


@triton.jit
def _places(C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """The rows and columns of a program, and where their values lie."""
    rows = tl.cast(tl.program_id(0), tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_C)
    return rows, columns, rows[:, None] * C + columns[None, :]


@triton.jit
def rmsnorm_rows(
    x,
    weight,
    out,
    R,
    C,
    eps,
    offset,
    HAS_WEIGHT: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows, columns, at = _places(C, BLOCK_R, BLOCK_C)
    seen = (rows < R)[:, None] & (columns < C)[None, :]
    x_RC = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
    scale_R = tl.rsqrt(tl.sum(x_RC * x_RC, 1) / C + eps)
    y_RC = x_RC * scale_R[:, None]
    if HAS_WEIGHT:
        if ROUNDED:
            y_RC = y_RC.to(out.dtype.element_ty).to(tl.float32)
        weight_C = tl.load(weight + columns, mask=columns < C, other=0.0).to(tl.float32)
        y_RC = y_RC * (weight_C + offset)[None, :]
    tl.store(out + at, y_RC.to(out.dtype.element_ty), mask=seen)


@triton.jit
def rmsnorm_loop(
    x, weight, out, R, C, eps, offset, HAS_WEIGHT: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_C: tl.constexpr
):
    row = tl.cast(tl.program_id(0), tl.int64) * C
    lanes = tl.arange(0, BLOCK_C)
    squares = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, C, BLOCK_C):
        columns = start + lanes
        x_C = tl.load(x + row + columns, mask=columns < C, other=0.0).to(tl.float32)
        squares += x_C * x_C
    scale = tl.rsqrt(tl.sum(squares, 0) / C + eps)
    for start in range(0, C, BLOCK_C):
        columns = start + lanes
        y_C = tl.load(x + row + columns, mask=columns < C, other=0.0).to(tl.float32) * scale
        if HAS_WEIGHT:
            if ROUNDED:
                y_C = y_C.to(out.dtype.element_ty).to(tl.float32)
            y_C = y_C * (tl.load(weight + columns, mask=columns < C, other=0.0).to(tl.float32) + offset)
        tl.store(out + row + columns, y_C.to(out.dtype.element_ty), mask=columns < C)


@triton.jit
def layernorm_rows(
    x,
    weight,
    bias,
    out,
    R,
    C,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows, columns, at = _places(C, BLOCK_R, BLOCK_C)
    inside = columns < C
    seen = (rows < R)[:, None] & inside[None, :]
    x_RC = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
    mean_R = tl.sum(x_RC, 1) / C
    y_RC = tl.where(seen, x_RC - mean_R[:, None], 0.0)
    y_RC = y_RC * tl.rsqrt(tl.sum(y_RC * y_RC, 1) / C + eps)[:, None]
    if HAS_WEIGHT:
        y_RC = y_RC * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y_RC = y_RC + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, y_RC.to(out.dtype.element_ty), mask=seen)


@triton.jit
def layernorm_loop(
    x, weight, bias, out, R, C, eps, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Each lane has the mean and the sum of squares of its own columns (Welford), so that a mean far from 0 costs no
    digits; at the end lanes are put together (Chan).
    """
    row = tl.cast(tl.program_id(0), tl.int64) * C
    lanes = tl.arange(0, BLOCK_C)
    means = tl.zeros([BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, C, BLOCK_C):
        columns = start + lanes
        x_C = tl.load(x + row + columns, mask=columns < C, other=0.0).to(tl.float32)
        away = tl.where(columns < C, x_C - means, 0.0)
        means += away / (start // BLOCK_C + 1)
        squares += tl.where(columns < C, away * (x_C - means), 0.0)
    counts = ((C - lanes + BLOCK_C - 1) // BLOCK_C).to(tl.float32)
    mean = tl.sum(means * counts, 0) / C
    scale = tl.rsqrt(tl.sum(squares + counts * (means - mean) * (means - mean), 0) / C + eps)
    for start in range(0, C, BLOCK_C):
        columns = start + lanes
        y_C = (tl.load(x + row + columns, mask=columns < C, other=0.0).to(tl.float32) - mean) * scale
        if HAS_WEIGHT:
            y_C = y_C * tl.load(weight + columns, mask=columns < C, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y_C = y_C + tl.load(bias + columns, mask=columns < C, other=0.0).to(tl.float32)
        tl.store(out + row + columns, y_C.to(out.dtype.element_ty), mask=columns < C)


@triton.jit
def softmax_rows(x, out, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    rows, columns, at = _places(C, BLOCK_R, BLOCK_C)
    seen = (rows < R)[:, None] & (columns < C)[None, :]
    x_RC = tl.load(x + at, mask=seen, other=-float("inf")).to(tl.float32)
    shares_RC = tl.exp(x_RC - tl.max(x_RC, 1)[:, None])
    y_RC = shares_RC / tl.sum(shares_RC, 1)[:, None]
    tl.store(out + at, y_RC.to(out.dtype.element_ty), mask=seen)


@triton.jit
def softmax_loop(x, out, R, C, BLOCK_C: tl.constexpr):
    """Each lane has the largest of its columns and their sum relative to it. A lane that saw -inf only has sum 0."""
    row = tl.cast(tl.program_id(0), tl.int64) * C
    lanes = tl.arange(0, BLOCK_C)
    most = tl.full([BLOCK_C], -float("inf"), tl.float32)
    sums = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, C, BLOCK_C):
        columns = start + lanes
        x_C = tl.load(x + row + columns, mask=columns < C, other=-float("inf")).to(tl.float32)
        more = tl.maximum(most, x_C)
        base = tl.where(more == -float("inf"), 0.0, more)
        sums = sums * tl.exp(most - base) + tl.exp(x_C - base)
        most = more
    largest = tl.max(most, 0)
    total = tl.sum(sums * tl.exp(tl.where(most == -float("inf"), most, most - largest)), 0)
    for start in range(0, C, BLOCK_C):
        columns = start + lanes
        x_C = tl.load(x + row + columns, mask=columns < C, other=-float("inf")).to(tl.float32)
        tl.store(out + row + columns, (tl.exp(x_C - largest) / total).to(out.dtype.element_ty), mask=columns < C)
