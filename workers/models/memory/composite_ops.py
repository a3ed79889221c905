"""Run torch's own composite operations where another library has replaced them with its kernels."""

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class ComposedOps(TorchFunctionMode):
    """Replace `layer_norm` by torch's composite form while entered.

    IPEX 2.8 registers a `layer_norm` for the CPU that fake tensors cannot differentiate: forward would save nothing for
    backward, with only a warning. torch's own form calls `native_layer_norm`, which they can differentiate.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = _layer_norm if func in (torch.layer_norm, functional.layer_norm) else func
        return called(*args, **(kwargs or {}))


def _layer_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    normal, _, _ = torch.native_layer_norm(input, normalized_shape, weight, bias, eps)
    return normal
