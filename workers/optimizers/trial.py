"""One call of a model, as measured and compared: forward, or for training forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workers.backends.parts.compare import Difference, difference, first_tensor
from workers.optimizers.work import Work


def call_of(model: nn.Module, work: Work) -> Callable[[], Any]:
    """Work must have a sample. Training's loss is the mean square of the first output: every weight gets a gradient."""
    assert work.sample is not None
    args, kwargs = work.sample

    def forward() -> Any:
        with torch.no_grad():
            return model(*args, **kwargs)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = first_tensor(model(*args, **kwargs)).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step if work.training else forward


def outcome(model: nn.Module, work: Work) -> list[torch.Tensor]:
    """What must stay the same, on the CPU: the first output, and for training each weight's gradient.

    Training is looked at in eval mode: dropout would make two runs differ by itself.
    """
    was_training = model.training
    model.eval()
    try:
        got = call_of(model, work)()
    finally:
        model.train(was_training)
    work.backend.step_boundary()
    found = [first_tensor(got).detach().float().cpu()]
    if work.training:
        found += [p.grad.detach().float().cpu() for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
    return found


def apart(have: list[torch.Tensor], want: list[torch.Tensor]) -> Difference:
    """The largest difference of any of them, each relative to its own largest value."""
    if len(have) != len(want):
        return Difference(float("inf"), float("inf"), 0.0)
    found = [difference(a, b) for a, b in zip(have, want, strict=True)]
    return Difference(max(d.max_abs for d in found), max(d.max_rel for d in found), found[0].largest)


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
