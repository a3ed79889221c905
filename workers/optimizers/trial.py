"""One call of a model, as measured and compared: forward, or for training forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.optimizers.inputs import Inputs
from workers.optimizers.model_state import unchanged
from workers.optimizers.output_difference import all_tensors
from workers.optimizers.pass_context import PassContext


def make_call(model: nn.Module, work: PassContext, inputs: Inputs | None = None) -> Callable[[], Any]:
    """Work must have a sample; a copy of it is used up by each call, or what `inputs` has ready. Training's loss sums
    the mean squares of all outputs: every weight gets a gradient.
    """
    assert work.sample is not None
    take = inputs.take if inputs else work.sample.copy

    def forward() -> Any:
        args, kwargs = take()
        with torch.no_grad():
            return model(*args, **kwargs)

    def step() -> torch.Tensor:
        args, kwargs = take()
        model.zero_grad(set_to_none=True)
        found = [t for t in all_tensors(model(*args, **kwargs)) if t.requires_grad]
        if not found:
            raise UserError("no output of the model depends on a parameter that learns", "return what to train on")
        loss = torch.stack([t.float().square().mean() for t in found]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step if work.training else forward


def outcome(model: nn.Module, work: PassContext) -> list[torch.Tensor]:
    """What must stay the same, on the CPU: every output, and for training each weight's gradient.

    Training is looked at in eval mode: dropout would make two runs differ by itself.
    """
    assert work.sample is not None
    was_training, given = model.training, work.sample.copy()
    model.eval()
    try:
        with unchanged(model):
            with torch.no_grad():
                found = all_tensors(model(*given.args, **given.kwargs))
            work.backend.step_boundary()
        if work.training:
            with unchanged(model):
                make_call(model, work)()
                work.backend.step_boundary()
    finally:
        model.train(was_training)
    if work.training:
        found = found + [p.grad for p in model.parameters() if p.grad is not None]
    kept = [tensor.detach().cpu() for tensor in found]
    model.zero_grad(set_to_none=True)
    return kept


def not_finite(values: list[torch.Tensor]) -> str:
    """Why results cannot be compared, "" when they can: a NaN, or a tensor without one finite value."""
    for number, tensor in enumerate(values):
        value = tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()
        nans = int(value.isnan().sum())
        if nans:
            return f"{nans} of the {value.numel()} values of result {number} are NaN"
        if value.numel() and not value.isfinite().any():
            return f"no value of result {number} is finite"
    return ""


def model_bytes(model: nn.Module) -> int:
    """Of parameters and buffers, shared ones once; of the packed data inside torchao's tensors."""
    seen: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in _parts(tensor):
            seen[id(part)] = part.numel() * part.element_size()
    return sum(seen.values())


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if not hasattr(tensor, "__tensor_flatten__") or type(tensor) in (torch.Tensor, nn.Parameter):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]
