"""Contexts in which models are traced: silenced logs, and torch's own composite operations.

Traces make torch fail on purpose, and the raised error contains the same as its log lines. Composite operations run
where another library has replaced them with its kernels.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ABOVE_CRITICAL = logging.CRITICAL + 1


@contextmanager
def silence() -> Iterator[None]:
    """Silence torch's loggers and warnings in the block, unless the user has set TORCH_LOGS.

    Process-wide. Loggers that are created inside inherit the level; all existing ones of torch's have their own.
    """
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    loggers = [logging.getLogger("torch"), *map(logging.getLogger, _names())]
    old_levels = [(logger, logger.level) for logger in loggers]
    try:
        for logger, level in old_levels:
            if level != logging.NOTSET or logger.name == "torch":
                logger.setLevel(ABOVE_CRITICAL)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.")
            yield
    finally:
        for logger, level in old_levels:
            logger.setLevel(level)


def _names() -> list[str]:
    return [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]


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
