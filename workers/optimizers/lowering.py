"""Lower precision around a model whose parameters and outputs stay float32."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.backends.parts.placing import map_tensors
from workers.backends.parts.precision import name_of
from workers.optimizers.work import Skip, Work

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend


class Autocast(nn.Module):
    """Runs `inner` in a lower precision where torch deems that safe; parameters and outputs stay float32."""

    def __init__(self, inner: nn.Module, backend: "BaseBackend", dtype: torch.dtype):
        super().__init__()
        self.inner = inner
        self._call = _lowered(inner, backend, dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _lowered(call: Callable[..., Any], backend: "BaseBackend", dtype: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(call)
    def run_lowered(*args: Any, **kwargs: Any) -> Any:
        with backend.autocast(dtype):
            output = call(*args, **kwargs)
        return map_tensors(output, lambda tensor: tensor.float() if tensor.dtype == dtype else tensor)

    return run_lowered


def autocast(model: nn.Module, work: Work) -> nn.Module:
    """For training the model's own forward is replaced: its type, its names and its checkpoints stay what they are."""
    if work.dtype == torch.float32:
        raise Skip("the precision asked for is float32")
    if not work.backend.supports_dtype(work.dtype):
        raise UserError(
            f"{work.backend.device} has no native {name_of(work.dtype)}", "ask for bfloat16 or float32 here"
        )
    work.details["autocast"] = name_of(work.dtype)
    if not work.training:
        return Autocast(model, work.backend, work.dtype)
    if work.dtype == torch.float16:
        remedy = "ask for bfloat16, or for float32 and use torch.autocast with a GradScaler in your loop"
        raise UserError("training in float16 needs loss scaling, which a plain loop lacks", remedy)
    model.forward = _lowered(model.forward, work.backend, work.dtype)
    return model
