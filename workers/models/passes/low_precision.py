"""Run a model in a lower precision while its parameters and outputs stay float32."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.devices.backends.device_transfer import map_tensors
from workers.devices.backends.dtype_checks import require_dtype
from workers.devices.backends.precision import name_of
from workers.models.passes.pass_context import PassContext, SkipPass, override_forward


@dataclass(frozen=True)
class Lowered:
    """Run a forward in a lower precision where torch considers that safe. Its outputs are converted to float32."""

    device_type: str
    dtype: torch.dtype

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype):
            output = call(*args, **kwargs)
        return map_tensors(output, lambda tensor: tensor.float() if tensor.dtype == self.dtype else tensor)


def autocast(model: nn.Module, context: PassContext) -> nn.Module:
    """Override the model's forward with one under autocast. Its type, names and checkpoints do not change."""
    if context.dtype == torch.float32:
        raise SkipPass("the requested precision is float32")
    require_dtype(context.backend, context.dtype)
    if context.training:
        require_trainable(context.dtype)
    override_forward(model, Lowered(context.backend.device.type, context.dtype))
    context.details["autocast"] = name_of(context.dtype)
    return model


def require_trainable(dtype: torch.dtype) -> None:
    """Raise UserError for float16, which a plain training loop cannot use."""
    if dtype == torch.float16:
        remedy = "use bfloat16, or float32 with torch.autocast and a GradScaler in your loop"
        raise UserError("training in float16 needs loss scaling, which a plain loop lacks", remedy)
