"""Attention in Pallas, with online softmax: a block of query tokens stays in VMEM while blocks of keys pass.

Letters of shapes: B batch, H query heads, G key heads, T query tokens, S key tokens, D width of a head, E of a value.
Scores and sums are in float32; in the products, probabilities have the dtype of the values.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from workers.kernels.sources.pallas_calls import INF, call, is_below


def attention(q_BHTD, k_BGSD, v_BGSE, mask_BHTS, *, blocks, scale, causal, return_lse, interpret):
    """Return [result] or [result, logarithms of sums of exponentials]; -inf for a token that sees nothing."""
    batch, heads, length, width = q_BHTD.shape
    keys, wide = v_BGSE.shape[2:]
    if not keys:
        nothing = [jnp.zeros((batch, heads, length, wide), v_BGSE.dtype)]
        return nothing + [jnp.full((batch, heads, length), -INF)] * return_lse
    if not width:  # all scores are 0
        q_BHTD, k_BGSD = (jnp.zeros((*one.shape[:3], 1), one.dtype) for one in (q_BHTD, k_BGSD))
    hides = mask_BHTS is not None and mask_BHTS.dtype == jnp.bool_
    if hides:  # exact in bfloat16, which has half the bytes of float32
        mask_BHTS = jnp.where(mask_BHTS, 0.0, -INF).astype(jnp.bfloat16)
    mask = [] if mask_BHTS is None else [mask_BHTS]
    kernel = partial(
        _attention, has_mask=bool(mask), hides=hides, scale=scale, causal=causal, length=length, keys=keys,
        return_lse=return_lse,
    )  # fmt: skip
    rows = blocks.queries
    outputs = [((batch, heads, length, wide), q_BHTD.dtype, (None, None, rows, wide), _of_queries)]
    if return_lse:
        outputs.append(((batch, heads, length, 1), jnp.float32, (None, None, rows, 1), _of_queries))
    grid = batch, heads, pl.cdiv(length, rows), pl.cdiv(keys, blocks.keys)
    order = ("parallel", "parallel", "parallel", "arbitrary")
    inputs = _inputs(q_BHTD, k_BGSD, v_BGSE, mask, blocks)
    scratch = [(rows, 1), (rows, 1), (rows, wide)]
    result, *lse = call(kernel, grid, order, inputs, outputs, scratch, interpret)
    return [result, *(one[..., 0] for one in lse)]


def _of_queries(b, h, t, s):
    return b, h, t, 0


def _inputs(q, k, v, mask, blocks):
    share = q.shape[1] // k.shape[1]

    def of_keys(b, h, t, s):
        return b, lax.div(h, jnp.int32(share)), s, 0

    inputs = [
        (q, (None, None, blocks.queries, q.shape[3]), _of_queries),
        (k, (None, None, blocks.keys, k.shape[3]), of_keys),
        (v, (None, None, blocks.keys, v.shape[3]), of_keys),
    ]
    for one in mask:
        block = tuple(
            1 if size == 1 else tokens
            for size, tokens in zip(one.shape[2:], (blocks.queries, blocks.keys), strict=True)
        )
        broadcast = tuple(size == 1 for size in one.shape)
        index = partial(_of_mask, broadcast=broadcast)
        inputs.append((one, (None, None, *block), index))
    return inputs


def _of_mask(*numbers, broadcast):
    return tuple(0 if alone else number for number, alone in zip(numbers, broadcast, strict=True))


def _attention(
    q_ref, k_ref, v_ref, *refs, has_mask, hides, scale, causal, length, keys, return_lse
):  # fmt: skip
    mask_ref = refs[0] if has_mask else None
    out_ref, *lse_refs, largest_ref, total_ref, sums_ref = refs[has_mask:]
    rows, block_keys = q_ref.shape[0], k_ref.shape[0]
    first_query, first_key = pl.program_id(2) * rows, pl.program_id(3) * block_keys
    past = keys - length  # causal counts from the end
    one_block = keys <= block_keys  # decided at compile time: nothing is conditional then

    @pl.when(one_block or pl.program_id(3) == 0)
    def _():
        largest_ref[...] = jnp.full_like(largest_ref, -INF)
        total_ref[...] = jnp.zeros_like(total_ref)
        sums_ref[...] = jnp.zeros_like(sums_ref)

    @pl.when(one_block or not causal or first_key <= first_query + rows - 1 + past)
    def _():
        scores = _product(q_ref[...], k_ref[...], 1) * scale
        if has_mask:
            added = mask_ref[...].astype(jnp.float32)
            scores = jnp.where(added == -INF, -INF, scores + added) if hides else scores + added
        is_visible = is_below(scores.shape, 1, first_key, keys)
        if causal:
            query = first_query + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            is_visible &= is_below(scores.shape, 1, first_key, query + past + 1)
        scores = jnp.where(is_visible, scores, -INF)
        values = v_ref[...]
        values = jnp.where(is_below(values.shape, 0, first_key, keys), values, jnp.zeros_like(values))
        _add(scores, values, largest_ref, total_ref, sums_ref)

    @pl.when(one_block or pl.program_id(3) == pl.num_programs(3) - 1)
    def _():
        total = total_ref[...]
        out_ref[...] = jnp.where(total == 0.0, 0.0, sums_ref[...] / total).astype(out_ref.dtype)
        for lse_ref in lse_refs:
            lse_ref[...] = jnp.where(total == 0.0, -INF, largest_ref[...] + jnp.log(total))


def _add(scores, values, largest_ref, total_ref, sums_ref):
    """Add a block of keys to the sums. A token without a visible key yet has the largest score -inf and sums of 0."""
    before = largest_ref[...]
    largest = jnp.maximum(before, jnp.max(scores, 1, keepdims=True))
    shift = jnp.where(largest == -INF, 0.0, largest)
    shares, shrink = jnp.exp(scores - shift), jnp.exp(before - shift)
    total_ref[...] = total_ref[...] * shrink + jnp.sum(shares, 1, keepdims=True)
    sums_ref[...] = sums_ref[...] * shrink + _product(shares.astype(values.dtype), values, 0)
    largest_ref[...] = largest


def _product(a, b, axis_of_b):
    """Product of matrices with sums in float32. A TPU multiplies float32 in one pass of bfloat16 by default."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (axis_of_b,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
