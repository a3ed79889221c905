"""The backward of an operation as a case of its own: gradients of its inputs, without the forward before them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WITHOUT_GRADIENT = {"rope": 2}
"""Number of an operation's last inputs that are tables, and have no gradient."""


class Gradients(nn.Module):
    """Compute the gradients of an operation's inputs. Inputs: the gradient of its result, then its own inputs."""

    def __init__(self, operation: str, function: Callable[..., Tensor]):
        super().__init__()
        self.function, self.tables = function, WITHOUT_GRADIENT.get(operation, 0)

    def forward(self, grad: Tensor, *inputs: Tensor) -> Tensor:
        return flatten(self.prepare(*inputs)(grad))

    def prepare(self, *inputs: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """Compute the forward once. Return the function that computes only the gradients, any number of times."""
        count = len(inputs) - self.tables
        learning = [one.detach().requires_grad_(number < count) for number, one in enumerate(inputs)]
        with torch.enable_grad():
            result = self.function(*learning)
        return lambda grad: torch.autograd.grad(result, learning[:count], grad, retain_graph=True)


def gradients_in(result: Any) -> tuple[Tensor, ...]:
    """Return the gradients in the result of a call, without those that are None."""
    return tuple(one for one in (result if isinstance(result, tuple) else (result,)) if one is not None)


def flatten(gradients: Any) -> Tensor:
    """Join gradients to one vector in the host's memory."""
    return torch.cat([one.detach().cpu().reshape(-1) for one in gradients_in(gradients)])


def random_gradient(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    """Draw the gradient of a result, whose shape follows from a call without memory."""
    return torch.randn(function(*(one.to("meta") for one in inputs)).shape)
