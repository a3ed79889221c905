"""What all Pallas kernels share: how a kernel is called, and which values of a block are in its array.

Kernels load float32 and bfloat16. Mosaic, the compiler of Pallas for TPUs, cannot load float16: callers convert it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from workers.kernels.compilation.pallas_blocks import VMEM_LIMIT_BYTES

CompilerParams = getattr(pltpu, "CompilerParams", None) or pltpu.TPUCompilerParams  # its name in jax 0.6.0
INF = float("inf")


def call(kernel, grid, order, inputs, outputs, scratch, interpret):
    """Call a kernel. `inputs`: (array, block, index) each; `outputs`: (shape, dtype, block, index) each; `order`: how
    each dimension of the grid may run, "parallel" or "arbitrary". Returns a list of arrays.
    """
    compiling = {
        "compiler_params": CompilerParams(dimension_semantics=order, vmem_limit_bytes=VMEM_LIMIT_BYTES),
    }
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _, _ in outputs],
        grid=grid,
        in_specs=[pl.BlockSpec(block, index) for _, block, index in inputs],
        out_specs=[pl.BlockSpec(block, index) for _, _, block, index in outputs],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        interpret=interpret,
        **({} if interpret else compiling),
    )(*(array for array, _, _ in inputs))


def is_below(shape, axis, start, end):
    """Return a bool block: whether an index of `axis`, counted from `start`, is below `end`."""
    return start + lax.broadcasted_iota(jnp.int32, shape, axis) < end
