"""Arrays for JAX: copies of torch's memory on a JAX device. JAX's arrays do not change, so writing replaces one."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of a Resident or of one call: its present JAX array, None before the first result."""

    value: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """A view of a buffer in a shape that one operation needs."""

    buffer: Buffer
    shape: torch.Size
    dtype: torch.dtype

    @property
    def value(self) -> Any:
        """The JAX array in this shape."""
        value = self.buffer.value
        return value if value.shape == tuple(self.shape) else value.reshape(tuple(self.shape))

    def fill(self, value: Any) -> None:
        self.buffer.value = value


def as_numpy(tensor: Tensor) -> "np.ndarray[Any, Any]":
    """Return the memory of a contiguous CPU tensor as a NumPy array. NumPy has no bfloat16 of its own."""
    host = tensor.detach()
    if host.dtype == torch.bfloat16:
        import ml_dtypes

        return host.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


def fill_tensor(tensor: Tensor, value: Any) -> None:
    """Wait for a JAX array and copy its values into a contiguous CPU tensor of the same dtype."""
    np.copyto(as_numpy(tensor), np.asarray(value).reshape(tuple(tensor.shape)))
