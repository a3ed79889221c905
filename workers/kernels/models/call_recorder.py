"""Record which operators the modules of a model call, and with which shapes, during one call of the model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SITE_PREFIX = "site "
"""Prefix of a module's number, passed instead of the name of kernels."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One recorded call. `shapes` are those of the tensor arguments except a mask; `causal` applies to attention."""

    site: int
    operation: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    causal: bool = False


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, record operators whose kernels are named `site N`, and compute them with torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RecordedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "polyfleet" and isinstance(args[-1], str) and args[-1].startswith(SITE_PREFIX):
            self._record(func.name().partition("::")[2], args)
            args = (*args[:-1], "torch")
        return func(*args, **(kwargs or {}))

    def _record(self, operation: str, args: tuple[Any, ...]) -> None:
        operands = args[:3] if operation == "attention" else args
        tensors = [one for one in operands if isinstance(one, Tensor)]
        shapes = tuple(tuple(int(size) for size in one.shape) for one in tensors)
        causal = operation == "attention" and bool(args[5])
        self.calls.append(
            RecordedCall(int(args[-1].removeprefix(SITE_PREFIX)), operation, tensors[0].dtype, shapes, causal)
        )
