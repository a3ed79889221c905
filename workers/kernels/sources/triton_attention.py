"""Attention by online softmax, and its gradients. One source for NVIDIA, AMD and Intel; imported on first use.

Letters as in parts/attention.py. A program has BLOCK_T tokens that ask of one head, or BLOCK_S that are kept of one
kept head, and `share` heads ask each kept one. Scores are kept as powers of 2. `MASK`: 0 none, 1 bytes that are not 0
where a token is seen, 2 values that are added; a stride of 0 serves all. `IN_FLOAT32` is for the interpreter alone,
which has no bfloat16 to multiply.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load(base, tokens, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """Tokens [·, WIDTH] as rows of BLOCK values; 0 beyond."""
    wide = tl.arange(0, BLOCK)
    at = base + tl.cast(tokens, tl.int64)[:, None] * WIDTH + wide[None, :]
    if WIDTH == BLOCK:
        values = tl.load(at, mask=(tokens < count)[:, None], other=0.0)
    else:
        values = tl.load(at, mask=(tokens < count)[:, None] & (wide < WIDTH)[None, :], other=0.0)
    if IN_FLOAT32:
        values = values.to(tl.float32)
    return values


@triton.jit
def _store(base, values, tokens, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    wide = tl.arange(0, BLOCK)
    at = base + tl.cast(tokens, tl.int64)[:, None] * WIDTH + wide[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=(tokens < count)[:, None] & (wide < WIDTH)[None, :])


@triton.jit
def _masked(
    scores, mask, stride_t, stride_s, asks, keeps, T, S, CAUSAL: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr
):
    """Scores of tokens `asks` [T, 1] by `keeps` [1, S], or turned; -inf where nothing is seen. Without `EDGE` all of
    them are inside and none lies ahead.
    """
    if EDGE:
        seen = (asks < T) & (keeps < S)
        if CAUSAL:
            seen = seen & (keeps <= asks + S - T)
        scores = tl.where(seen, scores, -float("inf"))
    if MASK != 0:
        at = mask + tl.cast(asks, tl.int64) * stride_t + tl.cast(keeps, tl.int64) * stride_s
        given = tl.load(at, mask=(asks < T) & (keeps < S), other=0)
        if MASK == 1:
            scores = tl.where(given != 0, scores, -float("inf"))
        else:
            scores = scores + given.to(tl.float32) * LOG2E
    return scores


@triton.jit
def _step(
    q,
    k,
    v,
    mask,
    start,
    tokens,
    most,
    total,
    sums,
    T,
    S,
    factor,
    stride_t,
    stride_s,
    D: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    EDGE: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Take BLOCK_S kept tokens in. A row that saw nothing yet has -inf for its largest score."""
    keeps = start + tl.arange(0, BLOCK_S)
    k_SD = _load(k, keeps, S, D, BLOCK_D, IN_FLOAT32)
    scores = tl.dot(q, tl.trans(k_SD), input_precision="ieee") * factor
    scores = _masked(scores, mask, stride_t, stride_s, tokens[:, None], keeps[None, :], T, S, CAUSAL, MASK, EDGE)
    more = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(more == -float("inf"), 0.0, more)
    shares = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    v_SE = _load(v, keeps, S, E, BLOCK_E, IN_FLOAT32)
    sums = tl.dot(shares.to(v_SE.dtype), v_SE, sums * shrink[:, None], input_precision="ieee")
    return more, total * shrink + tl.sum(shares, 1), sums


@triton.jit
def attention(
    q,
    k,
    v,
    mask,
    out,
    lse,
    T,
    S,
    H,
    share,
    scale,
    stride_b,
    stride_h,
    stride_t,
    stride_s,
    D: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    tiles = tl.cdiv(T, BLOCK_T)
    head = tl.cast(tl.program_id(0) // tiles, tl.int64)
    first = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_T  # causal: what has most to do begins
    tokens = first + tl.arange(0, BLOCK_T)
    k += head // share * S * D
    v += head // share * S * E
    mask += head // H * stride_b + head % H * stride_h
    q_TD = _load(q + head * T * D, tokens, T, D, BLOCK_D, IN_FLOAT32)
    factor = scale * LOG2E
    most = tl.full([BLOCK_T], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    sums = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    end, whole = S, S
    if CAUSAL:
        end = tl.minimum(S, tl.maximum(first + BLOCK_T + S - T, 0))
        whole = tl.minimum(S, tl.maximum(first + S - T + 1, 0))
    whole = whole // BLOCK_S * BLOCK_S
    for start in range(0, whole, BLOCK_S):
        most, total, sums = _step(
            q_TD, k, v, mask, start, tokens, most, total, sums, T, S, factor, stride_t, stride_s,
            D, E, CAUSAL, MASK, False, IN_FLOAT32, BLOCK_S, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_S):
        most, total, sums = _step(
            q_TD, k, v, mask, start, tokens, most, total, sums, T, S, factor, stride_t, stride_s,
            D, E, CAUSAL, MASK, True, IN_FLOAT32, BLOCK_S, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    _store(out + head * T * E, sums, tokens, T, E, BLOCK_E)
    if HAS_LSE:
        tl.store(lse + head * T + tokens, (most + tl.log2(total)) * LN2, mask=tokens < T)


@triton.jit
def attention_delta(g, out, delta, R, E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):
    """Σ g · out of each token that asks: what all its scores' gradients have in common."""
    rows = tl.cast(tl.program_id(0), tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    g_RE = _load(g, rows, R, E, BLOCK_E, True)
    out_RE = _load(out, rows, R, E, BLOCK_E, True)
    tl.store(delta + rows, tl.sum(g_RE * out_RE, 1), mask=rows < R)


@triton.jit
def attention_backward_q(
    g,
    q,
    k,
    v,
    mask,
    lse,
    delta,
    grad,
    T,
    S,
    H,
    share,
    scale,
    stride_b,
    stride_h,
    stride_t,
    stride_s,
    D: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    tiles = tl.cdiv(T, BLOCK_T)
    head = tl.cast(tl.program_id(0) // tiles, tl.int64)
    first = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_T
    tokens = first + tl.arange(0, BLOCK_T)
    k += head // share * S * D
    v += head // share * S * E
    mask += head // H * stride_b + head % H * stride_h
    q_TD = _load(q + head * T * D, tokens, T, D, BLOCK_D, IN_FLOAT32)
    g_TE = _load(g + head * T * E, tokens, T, E, BLOCK_E, IN_FLOAT32)
    lse_T = tl.load(lse + head * T + tokens, mask=tokens < T, other=0.0) * LOG2E
    delta_T = tl.load(delta + head * T + tokens, mask=tokens < T, other=0.0)
    sums = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(S, tl.maximum(first + BLOCK_T + S - T, 0))
    for start in range(0, end, BLOCK_S):
        keeps = start + tl.arange(0, BLOCK_S)
        k_SD = _load(k, keeps, S, D, BLOCK_D, IN_FLOAT32)
        scores = tl.dot(q_TD, tl.trans(k_SD), input_precision="ieee") * (scale * LOG2E)
        scores = _masked(scores, mask, stride_t, stride_s, tokens[:, None], keeps[None, :], T, S, CAUSAL, MASK, True)
        shares = tl.where(scores == -float("inf"), 0.0, tl.exp2(scores - lse_T[:, None]))
        v_SE = _load(v, keeps, S, E, BLOCK_E, IN_FLOAT32)
        slopes = shares * (tl.dot(g_TE, tl.trans(v_SE), input_precision="ieee") - delta_T[:, None])
        sums = tl.dot(slopes.to(k_SD.dtype), k_SD, sums, input_precision="ieee")
    _store(grad + head * T * D, sums * scale, tokens, T, D, BLOCK_D)


@triton.jit
def attention_backward_kv(
    g,
    q,
    k,
    v,
    mask,
    lse,
    delta,
    grad_k,
    grad_v,
    T,
    S,
    H,
    share,
    scale,
    stride_b,
    stride_h,
    stride_t,
    stride_s,
    D: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program adds up what all heads give that ask its kept head, in their order."""
    tiles = tl.cdiv(S, BLOCK_S)
    kept = tl.cast(tl.program_id(0) // tiles, tl.int64)
    first = tl.program_id(0) % tiles * BLOCK_S
    keeps = first + tl.arange(0, BLOCK_S)
    k_SD = _load(k + kept * S * D, keeps, S, D, BLOCK_D, IN_FLOAT32)
    v_SE = _load(v + kept * S * E, keeps, S, E, BLOCK_E, IN_FLOAT32)
    sums_k = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    sums_v = tl.zeros([BLOCK_S, BLOCK_E], tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(first + T - S, 0) // BLOCK_T * BLOCK_T
    for one in range(0, share):
        head = kept * share + one
        shown = mask + head // H * stride_b + head % H * stride_h
        for start in range(begin, T, BLOCK_T):
            tokens = start + tl.arange(0, BLOCK_T)
            q_TD = _load(q + head * T * D, tokens, T, D, BLOCK_D, IN_FLOAT32)
            lse_T = tl.load(lse + head * T + tokens, mask=tokens < T, other=0.0) * LOG2E
            scores = tl.dot(k_SD, tl.trans(q_TD), input_precision="ieee") * (scale * LOG2E)
            scores = _masked(
                scores, shown, stride_t, stride_s, tokens[None, :], keeps[:, None], T, S, CAUSAL, MASK, True
            )
            shares = tl.where(scores == -float("inf"), 0.0, tl.exp2(scores - lse_T[None, :]))
            g_TE = _load(g + head * T * E, tokens, T, E, BLOCK_E, IN_FLOAT32)
            sums_v = tl.dot(shares.to(g_TE.dtype), g_TE, sums_v, input_precision="ieee")
            delta_T = tl.load(delta + head * T + tokens, mask=tokens < T, other=0.0)
            slopes = shares * (tl.dot(v_SE, tl.trans(g_TE), input_precision="ieee") - delta_T[None, :])
            sums_k = tl.dot(slopes.to(q_TD.dtype), q_TD, sums_k, input_precision="ieee")
    _store(grad_k + kept * S * D, sums_k * scale, keeps, S, D, BLOCK_D)
    _store(grad_v + kept * S * E, sums_v, keeps, S, E, BLOCK_E)
