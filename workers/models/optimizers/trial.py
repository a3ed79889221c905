"""One call of a model for measuring and comparing: forward, or in training forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.measurement.inputs import Inputs
from workers.measurement.model_state import preserve_state
from workers.measurement.output_difference import all_tensors
from workers.models.passes.pass_context import PassContext


def make_call(model: nn.Module, context: PassContext, inputs: Inputs | None = None) -> Callable[[], Any]:
    """Return a function that runs one call on a copy of the context's sample (required), or on an input of `inputs`.

    In training, the loss is the sum of the mean squares of all outputs, so that every weight gets a gradient.
    """
    assert context.sample is not None
    take = inputs.next_input if inputs else context.sample.copy

    def forward() -> Any:
        args, kwargs = take()
        with torch.no_grad():
            return model(*args, **kwargs)

    def step() -> torch.Tensor:
        args, kwargs = take()
        model.zero_grad(set_to_none=True)
        trainable = [t for t in all_tensors(model(*args, **kwargs)) if t.requires_grad]
        if not trainable:
            raise UserError("no output of the model depends on a trainable parameter", "return an output to train on")
        loss = torch.stack([t.float().square().mean() for t in trainable]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step if context.training else forward


def outcome(model: nn.Module, context: PassContext) -> list[torch.Tensor]:
    """Return the tensors that passes must not change, on the CPU: every output, and in training each weight's gradient.

    Training is checked in eval mode, because dropout alone would make two runs differ.
    """
    assert context.sample is not None
    was_training, inputs = model.training, context.sample.copy()
    model.eval()
    try:
        with preserve_state(model):
            with torch.no_grad():
                results = all_tensors(model(*inputs.args, **inputs.kwargs))
            context.backend.step_boundary()
        if context.training:
            with preserve_state(model):
                make_call(model, context)()
                context.backend.step_boundary()
    finally:
        model.train(was_training)
    if context.training:
        results = results + [p.grad for p in model.parameters() if p.grad is not None]
    on_host = [tensor.detach().cpu() for tensor in results]
    model.zero_grad(set_to_none=True)
    return on_host


def not_finite(values: list[torch.Tensor]) -> str:
    """Return why results cannot be compared (a NaN, or a tensor without a finite value), or ""."""
    for number, tensor in enumerate(values):
        value = tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()
        nans = int(value.isnan().sum())
        if nans:
            return f"{nans} of the {value.numel()} values of result {number} are NaN"
        if value.numel() and not value.isfinite().any():
            return f"no value of result {number} is finite"
    return ""


def model_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, counting shared ones once, and packed data inside torchao's tensors."""
    sizes: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in _parts(tensor):
            sizes[id(part)] = part.numel() * part.element_size()
    return sum(sizes.values())


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if not hasattr(tensor, "__tensor_flatten__") or type(tensor) in (torch.Tensor, nn.Parameter):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]
