"""Operations as torch composes them, where a library loaded beside torch has put its own kernel in their place."""

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class ComposedOps(TorchFunctionMode):
    """IPEX 2.8 registers a `layer_norm` for the CPU that fake tensors cannot differentiate: forward would keep nothing
    of it, with a warning only. torch's own form of it is built from one that they can.
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
