"""Quantise linear layers with torchao: int8 weights on the CPU, float8 on devices with units for it."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from typing import Any

from torch import nn

from workers.devices.backends.dtype_checks import supports_dtype
from workers.models.passes.pass_context import PassContext, SkipPass, deep_copy, outputs, require_close

# Share of the largest output. Int8 per channel and float8 per tensor lose two to three decimal digits per layer.
QUANTIZED_RELATIVE = 5e-2


def int8_weights(model: nn.Module, context: PassContext) -> nn.Module:
    """Store weights of linear layers as int8 with a scale per output channel. Activations do not change."""
    if context.backend.device.type != "cpu":
        raise SkipPass("only for the CPU, where reading weights takes most of the time")
    return _quantize(model, context, "Int8WeightOnlyConfig")


def fp8_linear(model: nn.Module, context: PassContext) -> nn.Module:
    """Compute linear layers with weights and activations in float8, scaled per tensor at run time."""
    if not getattr(context.backend.config, "fp8", False):
        raise SkipPass(f"not allowed by the option {context.backend.BACKEND_NAME}.fp8")
    if not supports_dtype(context.backend, "float8_e4m3fn"):
        raise SkipPass(f"{context.backend.device} has no units for float8_e4m3fn")
    return _quantize(model, context, "Float8DynamicActivationFloat8WeightConfig")


def _quantize(model: nn.Module, context: PassContext, configuration: str) -> nn.Module:
    if context.is_training(model):
        raise SkipPass("quantised weights cannot be trained: call model.eval() first for inference")
    if not any(isinstance(m, nn.Linear) for m in model.modules()):
        raise SkipPass("the model has no linear layer")
    if context.sample is None:
        raise SkipPass("cannot be checked without a sample input")
    if find_spec("torchao") is None:
        raise SkipPass("needs torchao: install the extra 'quantize' in this environment")
    expected = outputs(model, context.sample)
    with _silence_torchao():
        ao: Any = __import__("torchao.quantization", fromlist=["quantize_"])
        quantized = deep_copy(model)  # so that the original is unchanged if the error is too large
        ao.quantize_(quantized, getattr(ao, configuration)())
        difference = require_close(outputs(quantized, context.sample), expected, QUANTIZED_RELATIVE)
    context.details[PASS_NAMES[configuration]] = f"output changed by {difference.max_rel:.1e} of its largest value"
    return quantized


PASS_NAMES = {"Int8WeightOnlyConfig": "int8_weights", "Float8DynamicActivationFloat8WeightConfig": "fp8_linear"}


@contextmanager
def _silence_torchao() -> Iterator[None]:
    """Silence torchao, which on import prints at length which of its GPU extensions do not load."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), warnings.catch_warnings():  # noqa: PTH123
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)
