"""Arrays for WebGPU: copies of the caller's arrays in the device's memory, and parts of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.errors import KernelsFailed
from workers.kernels.drivers.webgpu_device import Buffer, Device, padded_bytes

LETTERS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"}
ALIGNMENT_BYTES = 256
"""Alignment of the start of a binding, by WebGPU's default limits."""


@dataclass(frozen=True, slots=True)
class Array:
    """A contiguous array in a buffer, from `start_bytes`."""

    buffer: Buffer
    shape: torch.Size
    dtype: torch.dtype
    start_bytes: int = 0

    @property
    def letters(self) -> str:
        """Name of its dtype in the sources."""
        return LETTERS[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def numel(self) -> int:
        return self.shape.numel()

    def moved(self, buffer: Buffer) -> "Array":
        """Return an array like this at the start of another buffer."""
        return replace(self, buffer=buffer, start_bytes=0)

    def part(self, first: int, count: int) -> "Array":
        """Return `count` indices of the first dimension, from `first`."""
        stride_bytes = self.shape[1:].numel() * self.dtype.itemsize
        shape = torch.Size((count, *self.shape[1:]))
        return replace(self, shape=shape, start_bytes=self.start_bytes + first * stride_bytes)


def import_tensor(device: Device, tensor: Tensor, written: bool) -> Array:
    """Make an Array of a contiguous tensor: new memory, with a copy of the values unless `written`."""
    buffer = device.allocate(tensor.nbytes) if written else device.upload(as_bytes(tensor))
    return Array(buffer, tensor.shape, tensor.dtype)


def as_bytes(tensor: Tensor) -> "np.ndarray[Any, Any]":
    """Return the memory of a contiguous tensor as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def parts(device: Device, *arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Split arrays of one shape along the first dimension, into parts that a kernel can bind. Raises KernelsFailed if a
    part of the least size that WebGPU's alignment allows is larger.
    """
    rows, stride_bytes = arrays[0].shape[0], arrays[0].nbytes // max(arrays[0].shape[0], 1)
    if padded_bytes(arrays[0].nbytes) <= device.largest_binding_bytes:
        yield arrays
        return
    least = ALIGNMENT_BYTES // gcd(stride_bytes, ALIGNMENT_BYTES)
    count = device.largest_binding_bytes // (least * stride_bytes) * least
    if not count:
        raise too_large(device, "a part of the rows", least * stride_bytes, "use shorter rows, or kernels 'torch'")
    for first in range(0, rows, count):
        yield tuple(one.part(first, min(count, rows - first)) for one in arrays)


def require_bindable(device: Device, **arrays: Array | None) -> None:
    """Raise KernelsFailed if an array is larger than what a kernel can bind."""
    for name, one in arrays.items():
        if one is not None and padded_bytes(one.nbytes) > device.largest_binding_bytes:
            raise too_large(device, name, one.nbytes, "call it on fewer rows or batches at a time")


def too_large(device: Device, name: str, nbytes: int, remedy: str) -> KernelsFailed:
    limit = f"{device.info['device']} binds at most {device.largest_binding_bytes}"
    return KernelsFailed("webgpu", f"{name} takes {nbytes} bytes; {limit}", remedy)
