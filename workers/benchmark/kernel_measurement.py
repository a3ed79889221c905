"""An operation by an implementation of kernels, in the place of torch's own: the same inputs, the same reference."""

from collections.abc import Callable
from typing import Any

import torch

from cluster.errors import PolyfleetError
from workers import kernels as registry
from workers.backends.base import BaseBackend
from workers.backends.parts.precision import name_of
from workers.benchmark.measurement import CaseSettings, Unsupported
from workers.kernels.base import KernelBackend
from workers.optimization_levels import OptimizationLevel
from workers.optimizers.pass_context import Sample

EAGER = (OptimizationLevel.O0, OptimizationLevel.O1)
Method = Callable[[KernelBackend], Callable[..., Any]]
METHODS: dict[str, Method] = {
    "matmul": lambda k: k.matmul,
    "rmsnorm": lambda k: lambda x, w: k.rmsnorm(x, w, 1e-6),
    "layernorm": lambda k: k.layernorm,
    "softmax": lambda k: k.softmax,
    "silu": lambda k: k.silu,
    "swiglu": lambda k: k.swiglu,
    "rope": lambda k: k.apply_rope,
    "attention": lambda k: lambda q, key, v: k.attention(q, key, v, causal=q.shape[-2] == key.shape[-2]),
}
"""By the case's workload; arguments are the inputs of its module (case_builder.py)."""


def opened(cell: CaseSettings, backend: BaseBackend, dtype: torch.dtype) -> KernelBackend:
    """Raises Unsupported with the reason where these kernels cannot compute the cell here, or have no speed."""
    workload = cell.case.partition("/")[0]
    if workload not in METHODS or cell.is_model:
        raise Unsupported(f"{workload} is no operation of kernels: they have {', '.join(METHODS)}")
    if OptimizationLevel.from_string(cell.level) not in EAGER:
        raise Unsupported(f"kernels are measured as they are called, at O0 and O1, and {cell.level} compiles")
    try:
        made = registry.create(cell.kernels, backend.device if cell.kernels == "torch" else None)
    except PolyfleetError as e:
        raise Unsupported(e.message) from e
    if made.interpreted:
        raise Unsupported(f"kernels {cell.kernels!r} are interpreted here: that has no speed")
    if not made.takes(backend.device):
        raise Unsupported(f"kernels {cell.kernels!r} compute on {made.device}, this column is {backend.device}")
    if not made.supports(dtype):
        raise Unsupported(f"kernels {cell.kernels!r} do not compute in {name_of(dtype)}")
    return made


def forward(cell: CaseSettings, sample: Sample, kernels: KernelBackend) -> tuple[Callable[[Sample], Any], Sample]:
    """(the call with given inputs, its inputs where the kernels compute). Inputs are moved once, before anything is
    timed: what is measured is the kernel, and not the way to a driver's memory.
    """
    method = METHODS[cell.case.partition("/")[0]](kernels)
    inputs = Sample(tuple(kernels.to_device(one) for one in sample.args), {})

    def call(given: Sample) -> Any:
        with torch.no_grad():
            return method(*given.args)

    return call, inputs
