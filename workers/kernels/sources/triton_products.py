"""Products of matrices and vectors. One source for NVIDIA, AMD and Intel; imported on first use.

Matrices of a batch follow upon each other; a program has one tile of one of them. `IN_FLOAT32` is for the interpreter
alone, which has no bfloat16 to multiply.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(8)
"""So many rows of tiles go down together, so that they find the second matrix's columns in the cache."""


@triton.jit
def _tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(matrix of the batch, row of tiles, column of tiles) of a program."""
    program = tl.program_id(0)
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch, program = program // (down * across), program % (down * across)
    group = program // (GROUP * across)
    high = tl.minimum(down - group * GROUP, GROUP)
    within = program % (GROUP * across)
    return tl.cast(batch, tl.int64), group * GROUP + within % high, within // high


@triton.jit
def matmul(
    a,
    b,
    out,
    M,
    N,
    K,
    share,
    scale,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[n] = scale · a[n] · b[n // share]."""
    batch, down, across = _tile(M, N, BLOCK_M, BLOCK_N)
    rows = tl.cast(down, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.cast(across, tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    deep = tl.cast(depth, tl.int64)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if A_TRANSPOSED:
        at_a = a + batch * M * K + rows[:, None] + deep[None, :] * M
        step_a = tl.cast(M, tl.int64) * BLOCK_K
    else:
        at_a = a + batch * M * K + rows[:, None] * K + deep[None, :]
        step_a = BLOCK_K
    if B_TRANSPOSED:
        at_b = b + batch // share * N * K + deep[:, None] + columns[None, :] * K
        step_b = BLOCK_K
    else:
        at_b = b + batch // share * N * K + deep[:, None] * N + columns[None, :]
        step_b = tl.cast(N, tl.int64) * BLOCK_K
    for start in range(0, K, BLOCK_K):
        left = K - start
        a_MK = tl.load(at_a, mask=(rows < M)[:, None] & (depth < left)[None, :], other=0.0)
        b_KN = tl.load(at_b, mask=(depth < left)[:, None] & (columns < N)[None, :], other=0.0)
        if IN_FLOAT32:
            a_MK, b_KN = a_MK.to(tl.float32), b_KN.to(tl.float32)
        sums = tl.dot(a_MK, b_KN, sums, input_precision="ieee")
        at_a += step_a
        at_b += step_b
    at = out + batch * M * N + rows[:, None] * N + columns[None, :]
    tl.store(at, (sums * scale).to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def matmul_vec(a, x, out, M, K, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """out[n, m] = Σ a[n, m, k] · x[n, k]."""
    blocks = tl.cdiv(M, BLOCK_R)
    batch = tl.cast(tl.program_id(0) // blocks, tl.int64)
    rows = tl.cast(tl.program_id(0) % blocks, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = a + (batch * M + rows)[:, None] * K
    sums = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(0, K, BLOCK_C):
        columns = start + tl.arange(0, BLOCK_C)
        seen = (rows < M)[:, None] & (columns < K)[None, :]
        x_K = tl.load(x + batch * K + columns, mask=columns < K, other=0.0).to(tl.float32)
        sums += tl.load(at + columns[None, :], mask=seen, other=0.0).to(tl.float32) * x_K[None, :]
    tl.store(out + batch * M + rows, tl.sum(sums, 1).to(out.dtype.element_ty), mask=rows < M)


@triton.jit
def weighted_sum_rows(weights, rows, out, T, D, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """out[n, d] = Σ weights[n, t] · rows[n, t, d]."""
    blocks = tl.cdiv(D, BLOCK_C)
    batch = tl.cast(tl.program_id(0) // blocks, tl.int64)
    columns = tl.cast(tl.program_id(0) % blocks, tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    sums = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(0, T, BLOCK_R):
        tokens = first + tl.arange(0, BLOCK_R)
        seen = (tokens < T)[:, None] & (columns < D)[None, :]
        at = (batch * T + tokens)[:, None] * D + columns[None, :]
        weights_T = tl.load(weights + batch * T + tokens, mask=tokens < T, other=0.0).to(tl.float32)
        sums += tl.load(rows + at, mask=seen, other=0.0).to(tl.float32) * weights_T[:, None]
    tl.store(out + batch * D + columns, tl.sum(sums, 0).to(out.dtype.element_ty), mask=columns < D)
