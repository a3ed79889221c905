"""Measure an operation with a kernel back end instead of torch's own: same inputs, same reference."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cluster.errors import PolyfleetError
from workers import kernels as registry
from workers.benchmark.measurement import CaseSettings, Unsupported
from workers.devices.backends.base import BaseBackend
from workers.devices.backends.precision import name_of
from workers.kernels.base import KernelBackend
from workers.measurement.inputs import Sample
from workers.options.optimization_levels import OptimizationLevel

EAGER = (OptimizationLevel.O0, OptimizationLevel.O1)
Method = Callable[[KernelBackend], Callable[..., Any]]
METHODS: dict[str, Method] = {
    "matmul": lambda k: k.matmul,
    "matmul-vec": lambda k: k.matmul_vec,
    "attention-scores": lambda k: k.compute_attention_scores,
    "weighted-sum": lambda k: k.weighted_sum_rows,
    "rmsnorm": lambda k: lambda x, w: k.rmsnorm(x, w, 1e-6),
    "layernorm": lambda k: k.layernorm,
    "softmax": lambda k: k.softmax,
    "silu": lambda k: k.silu,
    "swiglu": lambda k: k.swiglu,
    "rope": lambda k: k.apply_rope,
    "attention": lambda k: lambda q, key, v: k.attention(q, key, v, causal=q.shape[-2] == key.shape[-2]),
}
"""Workload to kernel. Its arguments are the inputs of the case's module (cases/case_builder.py)."""


Backward = Callable[..., Callable[[Any], Any]]
BACKWARDS: dict[str, Backward] = {
    "matmul": lambda k, a, b: lambda g: k.matmul_backward(g, a, b),
    "rmsnorm": lambda k, x, w: lambda g: k.rmsnorm_backward(g, x, w, 1e-6),
    "layernorm": lambda k, x, w, b: lambda g: k.layernorm_backward(g, x, w, b),
    "softmax": lambda k, x: partial(_softmax_backward, k, k.softmax(x)),
    "silu": lambda k, x: lambda g: k.silu_backward(g, x),
    "swiglu": lambda k, gate, up: lambda g: k.swiglu_backward(g, gate, up),
    "rope": lambda k, x, cos, sin: lambda g: k.apply_rope_backward(g, cos, sin),
    "attention": lambda k, *arrays: _attention_backward(k, *arrays),
}
"""Workload to a function of kernels and the operation's inputs that returns the function of gradients."""
OWN_BY_FORWARD = frozenset({"matmul", "rope"})
"""Operations whose gradients every implementation computes with its kernel of the forward."""


def _softmax_backward(k: KernelBackend, y: Any, grad: Any) -> Any:
    return k.softmax_backward(grad, y)


def _attention_backward(k: KernelBackend, q: Any, key: Any, v: Any) -> Callable[[Any], Any]:
    causal = q.shape[-2] == key.shape[-2]
    result, lse = k.attention(q, key, v, causal=causal, return_lse=True)
    return lambda grad: k.attention_backward(grad, q, key, v, result, lse, causal=causal)


def create_kernels(settings: CaseSettings, backend: BaseBackend, dtype: torch.dtype) -> KernelBackend:
    """Create the kernel back end. Raises Unsupported if it cannot compute the case here, or is only interpreted."""
    workload = settings.case.partition("/")[0]
    if workload not in METHODS or settings.is_model:
        raise Unsupported(f"kernels do not implement {workload}: choose from {', '.join(METHODS)}")
    if OptimizationLevel.from_string(settings.level) not in EAGER:
        raise Unsupported(f"kernels are measured at O0 and O1 only: {settings.level} compiles the model")
    try:
        kernels = registry.create(settings.kernels, backend.device if settings.kernels == "torch" else None)
    except PolyfleetError as e:
        raise Unsupported(e.message) from e
    if kernels.interpreted:
        raise Unsupported(f"kernels {settings.kernels!r} are interpreted here, so their speed is not meaningful")
    if not kernels.takes(backend.device):
        raise Unsupported(f"kernels {settings.kernels!r} compute on {kernels.device}, this target is {backend.device}")
    if not kernels.supports(dtype):
        raise Unsupported(f"kernels {settings.kernels!r} do not compute in {name_of(dtype)}")
    return kernels


def make_forward(
    settings: CaseSettings, sample: Sample, kernels: KernelBackend
) -> tuple[Callable[[Sample], Any], Sample]:
    """Return (function that calls the kernel, its inputs in the kernels' memory).

    Inputs are moved once, before timing, so that the kernel is measured and not the transfer to a driver's memory.
    """
    method = METHODS[settings.case.partition("/")[0]](kernels)
    inputs = Sample(tuple(kernels.to_device(one) for one in sample.args), {})

    def call(call_inputs: Sample) -> Any:
        with torch.no_grad():
            return method(*call_inputs.args)

    return call, inputs


def make_backward(settings: CaseSettings, sample: Sample, kernels: KernelBackend) -> Callable[[Any], Any]:
    """Return the function that computes gradients with the kernels, after one forward.

    Raises Unsupported if they have no kernel for these gradients, and would use torch's formulas or copy the arrays.
    """
    workload, inputs = settings.case.partition("/")[0], sample.args[1:]
    if workload not in kernels.own_gradients | OWN_BY_FORWARD:
        raise Unsupported(f"kernels {settings.kernels!r} have no kernel of their own for the gradients of {workload}")
    if not isinstance(kernels.to_device(inputs[0]), torch.Tensor):
        raise Unsupported(f"kernels {settings.kernels!r} compute gradients only of arrays in torch's memory")
    compute = BACKWARDS[workload](kernels, *inputs)

    def call(grad: Any) -> Any:
        with torch.no_grad():
            return compute(grad)

    return call
