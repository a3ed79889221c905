"""Norms and softmax in Pallas: R rows of C values, sums in float32.

Narrow rows fit in VMEM and are read once. Wide rows are read twice, block by block: first for their sums,
which stay in VMEM (pallas_sums.py), then for their results.
"""

from functools import partial

import jax.numpy as jnp
from jax.experimental import pallas as pl

from workers.kernels.sources import pallas_sums as sums
from workers.kernels.sources.pallas_calls import INF, call, is_below


def rmsnorm(x_RC, weight_C, *, blocks, eps, offset, round_before_weight, interpret):
    weight = None if weight_C is None else offset + weight_C.astype(jnp.float32)
    rounds = round_before_weight and weight is not None and x_RC.dtype != jnp.float32
    finish = partial(_normed, eps=eps, rounds_to=x_RC.dtype if rounds else None, has_weight=weight is not None)
    vectors = [] if weight is None else [weight]
    if blocks.single_pass:
        return _narrow_rows(partial(_with_squares, finish=finish), x_RC, vectors, blocks, interpret)
    return _wide_rows(sums.add_squares, partial(_finish_rms, finish=finish), 1, x_RC, vectors, blocks, interpret)


def layernorm(x_RC, weight_C, bias_C, *, blocks, eps, interpret):
    has = weight_C is not None, bias_C is not None
    vectors = [one.astype(jnp.float32) for one in (weight_C, bias_C) if one is not None]
    finish = partial(_centred, eps=eps, has=has)
    if blocks.single_pass:
        return _narrow_rows(partial(_with_moments, finish=finish), x_RC, vectors, blocks, interpret)
    return _wide_rows(sums.add_moments, partial(_finish_layer, finish=finish), 2, x_RC, vectors, blocks, interpret)


def softmax(x_RC, *, blocks, interpret):
    if blocks.single_pass:
        return _narrow_rows(_softmax, x_RC, [], blocks, interpret)
    return _wide_rows(sums.add_exponentials, _finish_softmax, 2, x_RC, [], blocks, interpret)


# Narrow rows: `compute(x, inside, length, *vectors)` returns the block of results.


def _narrow_rows(compute, x_RC, vectors, blocks, interpret):
    rows, length = x_RC.shape

    def kernel(x_ref, *refs):
        *vector_refs, out_ref = refs
        inside = is_below(x_ref.shape, 1, 0, length)
        x = jnp.where(inside, x_ref[...].astype(jnp.float32), 0.0)
        out_ref[...] = compute(x, inside, length, *(one[...] for one in vector_refs)).astype(out_ref.dtype)

    block = (blocks.rows, blocks.width)
    inputs = [(x_RC, block, lambda i: (i, 0))]
    inputs += [(one[None], (1, blocks.width), lambda i: (0, 0)) for one in vectors]
    outputs = [(x_RC.shape, x_RC.dtype, block, lambda i: (i, 0))]
    return call(kernel, (pl.cdiv(rows, blocks.rows),), ("parallel",), inputs, outputs, [], interpret)[0]


def _with_squares(x, inside, length, *vectors, finish):
    return finish(x, jnp.sum(x * x, 1, keepdims=True) / length, *vectors)


def _with_moments(x, inside, length, *vectors, finish):
    mean = jnp.sum(x, 1, keepdims=True) / length
    centred = jnp.where(inside, x - mean, 0.0)
    return finish(centred, jnp.sum(centred * centred, 1, keepdims=True) / length, *vectors)


def _softmax(x, inside, length):
    largest = jnp.max(jnp.where(inside, x, -INF), 1, keepdims=True)
    shares = jnp.where(inside, jnp.exp(x - largest), 0.0)
    return shares / jnp.sum(shares, 1, keepdims=True)


# Wide rows: `add(j, x, inside, length, sums)` in the first pass, `finish(x, length, sums, vectors)` in the second.


def _wide_rows(add, finish, sum_count, x_RC, vectors, blocks, interpret):
    rows, length = x_RC.shape
    width = blocks.width

    def kernel(x_ref, *refs):
        vector_refs, out_ref, sum_refs = refs[: len(vectors)], refs[len(vectors)], refs[len(vectors) + 1 :]
        j = pl.program_id(2)
        inside = is_below(x_ref.shape, 1, j * width, length)
        x = jnp.where(inside, x_ref[...].astype(jnp.float32), 0.0)

        @pl.when(pl.program_id(1) == 0)
        def _():
            add(j, x, inside, length, *sum_refs)

        @pl.when(pl.program_id(1) == 1)
        def _():
            result = finish(x, length, *(one[...] for one in (*sum_refs, *vector_refs)))
            out_ref[...] = result.astype(out_ref.dtype)

    block = (blocks.rows, width)
    grid = (pl.cdiv(rows, blocks.rows), 2, pl.cdiv(length, width))
    inputs = [(x_RC, block, lambda i, second, j: (i, j))]
    inputs += [(one[None], (1, width), lambda i, second, j: (0, j * second)) for one in vectors]
    # In the first pass the result's first block stays, unwritten: a block is stored when its index changes.
    outputs = [(x_RC.shape, x_RC.dtype, block, lambda i, second, j: (i, j * second))]
    order = ("parallel", "arbitrary", "arbitrary")
    return call(kernel, grid, order, inputs, outputs, [(blocks.rows, 1)] * sum_count, interpret)[0]


def _finish_rms(x, length, squares, *vectors, finish):
    return finish(x, squares / length, *vectors)


def _finish_layer(x, length, mean, squares, *vectors, finish):
    return finish(x - mean, squares / length, *vectors)


def _finish_softmax(x, length, largest, total):
    return jnp.exp(x - largest) / total


# Results of norms


def _normed(x, mean_square, *vectors, eps, rounds_to, has_weight):
    normed = x * (1.0 / jnp.sqrt(mean_square + eps))
    if rounds_to is not None:
        normed = normed.astype(rounds_to).astype(jnp.float32)
    return normed * vectors[0] if has_weight else normed


def _centred(centred, variance, *vectors, eps, has):
    left = list(vectors)
    normed = centred * (1.0 / jnp.sqrt(variance + eps))
    normed = normed * left.pop(0) if has[0] else normed
    return normed + left.pop(0) if has[1] else normed
