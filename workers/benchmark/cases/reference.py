"""Compute the reference result on the CPU in float64, from weights and inputs rounded to the measured precision."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.benchmark.cases.case_builder import BuiltCase
from workers.devices.backends.device_transfer import map_tensors
from workers.measurement.inputs import Sample
from workers.measurement.output_difference import first_tensor

MAX_FLOPS = 2e12
"""Above this, float64 on the CPU would take too long: the reference is computed in float32, and above 20 times this
nothing is checked. The result reports both."""


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """`output` of a forward, or the loss, and gradients in the order of parameters; or the reason in `reason`."""

    dtype: str = "float64"
    output: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()
    reason: str = ""


def compute(built: BuiltCase, sample: Sample, train: bool, flops: float) -> ReferenceResult:
    """Compute the reference. `sample` is already rounded to the measured precision."""
    if flops > 20 * MAX_FLOPS:
        return ReferenceResult(reason=f"{flops:.2g} operations are too many for a reference on the CPU")
    dtype = torch.float64 if flops <= MAX_FLOPS else torch.float32
    module = copy.deepcopy(built.module).to(dtype)
    inputs = round_inputs(sample.copy(), dtype)
    name, rng_state = str(dtype).removeprefix("torch."), torch.get_rng_state()
    module.train(train)
    with torch.set_grad_enabled(train):
        output = module(*inputs.args, **inputs.kwargs)
    if not torch.equal(rng_state, torch.get_rng_state()):
        return ReferenceResult(reason="it draws random numbers (perhaps dropout), which differ between devices")
    if not train:
        return ReferenceResult(name, first_tensor(output).detach())
    loss = built.loss(output)  # its rounding to float32 is the same for every target
    loss.backward()  # type: ignore[no-untyped-call]
    grads = tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters())
    return ReferenceResult(name, loss.detach(), grads)


def round_inputs(sample: Sample, dtype: torch.dtype) -> Sample:
    """Convert floating-point inputs to `dtype`. Token ids do not change."""
    args: tuple[Tensor, ...] = map_tensors(sample.args, lambda t: t.to(dtype) if t.is_floating_point() else t)
    kwargs: dict[str, Tensor] = map_tensors(sample.kwargs, lambda t: t.to(dtype) if t.is_floating_point() else t)
    return Sample(args, kwargs)
