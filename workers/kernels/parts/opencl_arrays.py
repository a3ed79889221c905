"""Arrays in a driver's memory: torch's own where the device is the CPU, copies elsewhere."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.errors import KernelsFailed
from workers.kernels.parts.opencl_driver import Driver

LETTERS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class Array:
    """Contiguous, at the beginning of a buffer."""

    buffer: Any
    shape: torch.Size
    dtype: torch.dtype

    @property
    def letters(self) -> str:
        """As the sources name its dtype."""
        return LETTERS[self.dtype]

    def numel(self) -> int:
        return self.shape.numel()


def imported(driver: Driver, tensor: Tensor, written: bool) -> Array:
    """A contiguous tensor: its own memory on a CPU, without a copy, or a copy of what is read."""
    flags = driver.cl.mem_flags
    if not tensor.numel():
        return Array(None, tensor.shape, tensor.dtype)
    _require_fits(driver, tensor.nbytes)
    if driver.on_cpu:
        buffer = driver.cl.Buffer(driver.context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=as_bytes(tensor))
    elif written:
        buffer = driver.cl.Buffer(driver.context, flags.READ_WRITE, tensor.nbytes)
    else:
        buffer = driver.cl.Buffer(driver.context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=as_bytes(tensor))
    return Array(buffer, tensor.shape, tensor.dtype)


def copied(driver: Driver, tensor: Tensor) -> Any:
    """A buffer of the driver's own with the values of a contiguous tensor."""
    _require_fits(driver, tensor.nbytes)
    flags = driver.cl.mem_flags
    if not tensor.numel():
        return empty(driver, 0)
    return driver.cl.Buffer(driver.context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=as_bytes(tensor))


def empty(driver: Driver, nbytes: int) -> Any:
    """New memory of the driver's; none is a few bytes."""
    _require_fits(driver, nbytes)
    return driver.cl.Buffer(driver.context, driver.cl.mem_flags.READ_WRITE, max(nbytes, 4))


def bring(driver: Driver, array: Array, tensor: Tensor) -> None:
    """Wait for what was computed, and have it in the tensor."""
    if not tensor.numel():
        return
    if driver.on_cpu:
        shape = (tensor.nbytes,)
        mapped, _ = driver.cl.enqueue_map_buffer(
            driver.queue, array.buffer, driver.cl.map_flags.READ, 0, shape, np.uint8, is_blocking=True
        )
        mapped.base.release(driver.queue)
    else:
        driver.cl.enqueue_copy(driver.queue, as_bytes(tensor), array.buffer)


def as_bytes(tensor: Tensor) -> "np.ndarray[Any, Any]":
    """The memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _require_fits(driver: Driver, nbytes: int) -> None:
    if nbytes > driver.largest_bytes:
        raise KernelsFailed(
            "opencl",
            f"an array of {nbytes} bytes, and {driver.device.name} has at most {driver.largest_bytes} in one",
            "call it on fewer rows at a time",
        )
