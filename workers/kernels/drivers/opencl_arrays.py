"""Arrays for OpenCL: torch's own memory if the device is the CPU, else copies in the device's memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.errors import KernelsFailed
from workers.kernels.drivers.opencl_driver import Driver

LETTERS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class Array:
    """A contiguous array at the start of a buffer."""

    buffer: Any
    shape: torch.Size
    dtype: torch.dtype

    @property
    def letters(self) -> str:
        """Name of its dtype in the sources."""
        return LETTERS[self.dtype]

    def numel(self) -> int:
        return self.shape.numel()


def import_tensor(driver: Driver, tensor: Tensor, written: bool) -> Array:
    """Make an Array of a contiguous tensor: on a CPU its own memory, else a new buffer with a copy unless `written`."""
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


def copy_tensor(driver: Driver, tensor: Tensor) -> Any:
    """Create a buffer in the driver's memory with the values of a contiguous tensor."""
    _require_fits(driver, tensor.nbytes)
    flags = driver.cl.mem_flags
    if not tensor.numel():
        return allocate(driver, 0)
    return driver.cl.Buffer(driver.context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=as_bytes(tensor))


def allocate(driver: Driver, nbytes: int) -> Any:
    """Allocate a buffer in the driver's memory, at least 4 bytes."""
    _require_fits(driver, nbytes)
    return driver.cl.Buffer(driver.context, driver.cl.mem_flags.READ_WRITE, max(nbytes, 4))


def copy_back(driver: Driver, array: Array, tensor: Tensor) -> None:
    """Wait for the computation, and copy its result into the tensor unless they share memory."""
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
    """Return the memory of a contiguous tensor as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _require_fits(driver: Driver, nbytes: int) -> None:
    if nbytes > driver.largest_bytes:
        raise KernelsFailed(
            "opencl",
            f"an array has {nbytes} bytes; {driver.device.name} allows at most {driver.largest_bytes}",
            "call it on fewer rows at a time",
        )
