"""Fewer bits for linear layers, through torchao: int8 weights on the CPU, float8 where the units are."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from typing import Any

from torch import nn

from workers.optimizers.pass_context import PassContext, SkipPass, deep_copy, outputs, require_close

# Of the largest output. Int8 weights by channel and float8 by tensor lose two to three decimal digits per layer.
QUANTIZED_RELATIVE = 5e-2


def int8_weights(model: nn.Module, work: PassContext) -> nn.Module:
    """Weights of linear layers as int8 with a scale per output channel; activations stay as they are."""
    if work.backend.device.type != "cpu":
        raise SkipPass("for the CPU, where reading weights is what takes the time")
    return _quantized(model, work, "Int8WeightOnlyConfig")


def fp8_linear(model: nn.Module, work: PassContext) -> nn.Module:
    """Linear layers with weights and activations in float8, scaled by tensor as they come."""
    if not getattr(work.backend.config, "fp8", False):
        raise SkipPass(f"not allowed by the option {work.backend.BACKEND_NAME}.fp8")
    if not work.backend.supports_dtype("float8_e4m3fn"):
        raise SkipPass(f"{work.backend.device} has no units for float8_e4m3fn")
    return _quantized(model, work, "Float8DynamicActivationFloat8WeightConfig")


def _quantized(model: nn.Module, work: PassContext, configuration: str) -> nn.Module:
    if work.learns(model):
        raise SkipPass("quantised weights do not learn: call model.eval() first for inference")
    if not any(isinstance(m, nn.Linear) for m in model.modules()):
        raise SkipPass("the model has no linear layer")
    if work.sample is None:
        raise SkipPass("it cannot be checked without a sample input")
    if find_spec("torchao") is None:
        raise SkipPass("it needs the package torchao in this environment: the extra 'quantize'")
    want = outputs(model, work.sample)
    with _quiet():
        ao: Any = __import__("torchao.quantization", fromlist=["quantize_"])
        quantized = deep_copy(model)  # so that the model is what it was where the result is too far off
        ao.quantize_(quantized, getattr(ao, configuration)())
        moved = require_close(outputs(quantized, work.sample), want, QUANTIZED_RELATIVE)
    work.details[NAMES[configuration]] = f"output moved by {moved.max_rel:.1e} of its largest value"
    return quantized


NAMES = {"Int8WeightOnlyConfig": "int8_weights", "Float8DynamicActivationFloat8WeightConfig": "fp8_linear"}


@contextmanager
def _quiet() -> Iterator[None]:
    """torchao tells on import, at length, which of its GPU extensions do not load."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), warnings.catch_warnings():  # noqa: PTH123
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)
