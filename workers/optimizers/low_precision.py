"""Lower precision around a model whose parameters and outputs stay float32."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.backends.parts.device_transfer import map_tensors
from workers.backends.parts.precision import name_of
from workers.optimizers.forward_override import override
from workers.optimizers.pass_context import PassContext, SkipPass


@dataclass(frozen=True)
class Lowered:
    """Runs a forward in a lower precision where torch deems that safe; what it returns is float32 again."""

    device_type: str
    dtype: torch.dtype

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype):
            output = call(*args, **kwargs)
        return map_tensors(output, lambda tensor: tensor.float() if tensor.dtype == self.dtype else tensor)


def autocast(model: nn.Module, work: PassContext) -> nn.Module:
    """The model's own forward is replaced: its type, its names and its checkpoints stay what they are."""
    if work.dtype == torch.float32:
        raise SkipPass("the precision asked for is float32")
    work.backend.require_dtype(work.dtype)
    if work.training:
        require_trainable(work.dtype)
    override(model, Lowered(work.backend.device.type, work.dtype))
    work.details["autocast"] = name_of(work.dtype)
    return model


def require_trainable(dtype: torch.dtype) -> None:
    """Raises UserError for float16."""
    if dtype == torch.float16:
        remedy = "ask for bfloat16, or for float32 and use torch.autocast with a GradScaler in your loop"
        raise UserError("training in float16 needs loss scaling, which a plain loop lacks", remedy)
