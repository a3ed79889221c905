"""Operations that XLA compiles well by itself, without Pallas: products, gates, rotary embedding and
conversions.

Products have sums in float32. float32 itself is multiplied in full precision, which is not the default on a TPU.
"""

import jax.numpy as jnp
from jax import lax


def matmul(a_BMK, b_BKN, *, a_transposed, b_transposed):
    return _product(a_BMK, b_BKN, f"b{'km' if a_transposed else 'mk'},b{'nk' if b_transposed else 'kn'}->bmn")


def matmul_vec(a_BMK, x_BK):
    return _product(a_BMK, x_BK, "bmk,bk->bm")


def weighted_sum_rows(weights_BT, rows_BTD):
    return _product(weights_BT, rows_BTD, "bt,btd->bd")


def scores(q_BHTD, k_BGSD, *, scale):
    batch, heads, length, width = q_BHTD.shape
    groups, keys = k_BGSD.shape[1:3]
    q = q_BHTD.reshape(batch, groups, heads // groups, length, width)
    return _product(q, k_BGSD, "bghtd,bgsd->bghts", scale).reshape(batch, heads, length, keys)


def silu(x_RC):
    return _silu(x_RC).astype(x_RC.dtype)


def swiglu(gate_RC, up_RC):
    return (_silu(gate_RC) * up_RC.astype(jnp.float32)).astype(gate_RC.dtype)


def rope(x_BTD, cos_SP, sin_SP, position, *, pairs):
    """`position` is an array, so that decoding compiles once."""
    length, count = x_BTD.shape[1], cos_SP.shape[1]
    cos, sin = (lax.dynamic_slice_in_dim(one, position, length).astype(jnp.float32) for one in (cos_SP, sin_SP))
    x = x_BTD.astype(jnp.float32)
    rotating, rest = x[..., : 2 * count], x_BTD[..., 2 * count :]
    if pairs:
        first, second = rotating[..., 0::2], rotating[..., 1::2]
    else:
        first, second = rotating[..., :count], rotating[..., count:]
    turned = first * cos - second * sin, second * cos + first * sin
    joined = jnp.stack(turned, -1).reshape(rotating.shape) if pairs else jnp.concatenate(turned, -1)
    return jnp.concatenate((joined.astype(x_BTD.dtype), rest), -1)


def converted(x, *, dtype):
    return x.astype(dtype)


def weighted(normed_RC, weight_C, *, offset, dtype):
    """Round to `dtype`, multiply with the weight, round again. XLA would elide a conversion to `dtype` and back."""
    limits = jnp.finfo(dtype)
    rounded = lax.reduce_precision(normed_RC, exponent_bits=limits.nexp, mantissa_bits=limits.nmant)
    return (rounded * (offset + weight_C.astype(jnp.float32))).astype(dtype)


def _silu(x):
    x = x.astype(jnp.float32)
    return x / (1.0 + jnp.exp(-x))


def _product(a, b, letters, scale=1.0):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    product = jnp.einsum(letters, a, b, precision=precision, preferred_element_type=jnp.float32)
    return (product * scale).astype(a.dtype)
