"""Sums over wide rows, block by block, in references to VMEM of one value per row.

`j` is the number of the block, `x` its values in float32, 0 where `inside` is False. Block 0 initialises the sums.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from workers.kernels.sources.pallas_calls import INF


def add_squares(j, x, inside, length, squares_ref):
    @pl.when(j == 0)
    def _():
        squares_ref[...] = jnp.zeros_like(squares_ref)

    squares_ref[...] += jnp.sum(x * x, 1, keepdims=True)


def add_moments(j, x, inside, length, mean_ref, squares_ref):
    """Combine the mean and the sum of squared differences from it with those of a block (Chan, Golub, LeVeque 1979):
    squares of values far from 0 would cancel.
    """

    @pl.when(j == 0)
    def _():
        mean_ref[...] = jnp.zeros_like(mean_ref)
        squares_ref[...] = jnp.zeros_like(squares_ref)

    before = (j * x.shape[1]).astype(jnp.float32)
    count = jnp.minimum(length - j * x.shape[1], x.shape[1]).astype(jnp.float32)
    mean = jnp.sum(x, 1, keepdims=True) / count
    centred = jnp.where(inside, x - mean, 0.0)
    difference = mean - mean_ref[...]
    share = count / (before + count)
    squares_ref[...] += jnp.sum(centred * centred, 1, keepdims=True) + difference * difference * before * share
    mean_ref[...] += difference * share


def add_exponentials(j, x, inside, length, largest_ref, total_ref):
    """Add exponentials of differences from the largest value so far. While all are -inf their sum is 0."""

    @pl.when(j == 0)
    def _():
        largest_ref[...] = jnp.full_like(largest_ref, -INF)
        total_ref[...] = jnp.zeros_like(total_ref)

    x = jnp.where(inside, x, -INF)
    before = largest_ref[...]
    largest = jnp.maximum(before, jnp.max(x, 1, keepdims=True))
    shift = jnp.where(largest == -INF, 0.0, largest)
    shares = jnp.sum(jnp.exp(x - shift), 1, keepdims=True)
    total_ref[...] = total_ref[...] * jnp.exp(before - shift) + shares
    largest_ref[...] = largest
