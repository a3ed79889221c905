"""What a cell should compute: on the CPU in float64, from weights and inputs as the cell's precision has them."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.backends.parts.device_transfer import map_tensors
from workers.benchmark.case_builder import Built
from workers.optimizers.output_difference import first_tensor
from workers.optimizers.pass_context import Sample

MOST_FLOPS = 2e12
"""Beyond this float64 on the CPU takes longer than a user waits: then float32, which is said, and beyond 20 times this
nothing is checked, which is said too."""


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """`output` of a forward, or the loss, and gradients in the order of the module's parameters. `why_not` else."""

    dtype: str = "float64"
    output: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()
    why_not: str = ""


def compute(built: Built, sample: Sample, train: bool, flops: float) -> ReferenceResult:
    """`sample` is as the cell has it, rounded to its precision."""
    if flops > 20 * MOST_FLOPS:
        return ReferenceResult(why_not=f"{flops:.2g} operations are too many for a reference on the CPU")
    dtype = torch.float64 if flops <= MOST_FLOPS else torch.float32
    module = copy.deepcopy(built.module).to(dtype)
    inputs = rounded(sample.copy(), dtype)
    name, drawn = str(dtype).removeprefix("torch."), torch.get_rng_state()
    module.train(train)
    with torch.set_grad_enabled(train):
        output = module(*inputs.args, **inputs.kwargs)
    if not torch.equal(drawn, torch.get_rng_state()):
        return ReferenceResult(why_not="it draws random numbers (dropout, perhaps), and each device draws others")
    if not train:
        return ReferenceResult(name, first_tensor(output).detach())
    loss = built.loss(output)  # its own rounding to float32 is the same on every side
    loss.backward()  # type: ignore[no-untyped-call]
    grads = tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters())
    return ReferenceResult(name, loss.detach(), grads)


def rounded(sample: Sample, dtype: torch.dtype) -> Sample:
    """Floating-point inputs in `dtype`; token ids stay."""
    args: tuple[Tensor, ...] = map_tensors(sample.args, lambda t: t.to(dtype) if t.is_floating_point() else t)
    kwargs: dict[str, Tensor] = map_tensors(sample.kwargs, lambda t: t.to(dtype) if t.is_floating_point() else t)
    return Sample(args, kwargs)
