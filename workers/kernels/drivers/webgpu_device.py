"""A WebGPU device: its limits, memory, copies and errors."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cluster.errors import PolyfleetError
from workers.errors import KernelsFailed
from workers.kernels.drivers.webgpu_adapters import check_process, find_adapter, import_wgpu

GROUP, CPU_GROUP = 256, 64
LLVMPIPE_STEPS, UNLIMITED_STEPS = 20_000, 1 << 31
"""Maximum number of loop iterations of an invocation. llvmpipe silently ends all loops after 65,535 in total."""
MAX_BYTES = (1 << 32) - 256
"""Offsets in WGSL are 32 bits wide."""
STAGING_BYTES, PADDING_BYTES = 16 << 20, 16
LIMITS = (
    *("max-storage-buffer-binding-size", "max-buffer-size", "max-storage-buffers-per-shader-stage"),
    *("max-compute-invocations-per-workgroup", "max-compute-workgroup-size-x", "max-compute-workgroup-storage-size"),
)
LOST, NO_MEMORY = "device is lost", "Not enough memory left"
REMEDY = "use kernels 'torch', and open an issue with the adapter, its driver and the call"


class Buffer:
    """Memory of one device; it is unusable once `device` is lost."""

    __slots__ = ("device", "handle")

    def __init__(self, handle: Any, device: Any):
        self.handle, self.device = handle, device


class Device:
    """An adapter with a device, which is created again after it was lost. Calls from several threads are serialised."""

    def __init__(self, adapter: Any):
        self.wgpu = import_wgpu()
        self.adapter, self.info = adapter, dict(adapter.info)
        self.on_cpu = self.info["adapter_type"] == "CPU"
        limits = adapter.limits
        self.largest_bytes = min(int(limits["max-buffer-size"]), MAX_BYTES)
        self.largest_binding_bytes = min(int(limits["max-storage-buffer-binding-size"]), MAX_BYTES)
        self.group = min(CPU_GROUP if self.on_cpu else GROUP, int(limits["max-compute-invocations-per-workgroup"]))
        self.max_steps = LLVMPIPE_STEPS if self.info["vendor"] == "llvmpipe" else UNLIMITED_STEPS
        self._device: Any = None
        self._staging: Any = None
        self._lock = threading.RLock()

    # Memory

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate at least `nbytes`, filled with zeros and padded to quads of float32."""
        self._require_fits(nbytes)
        usage = self.wgpu.BufferUsage
        with self._calls() as device:
            kind = usage.STORAGE | usage.COPY_SRC | usage.COPY_DST
            try:
                return Buffer(device.create_buffer(size=padded_bytes(nbytes), usage=kind), device)
            except self.wgpu.GPUError as e:
                if is_memory_error(e):
                    raise _out_of_memory(f"an array of {nbytes} bytes does not fit") from e
                raise

    def upload(self, values: Any) -> Buffer:
        """Copy a NumPy array of bytes to new memory."""
        buffer = self.allocate(values.nbytes)
        even = values.nbytes // 4 * 4  # copies are multiples of 4 bytes
        with self._calls() as device:
            if even:
                device.queue.write_buffer(buffer.handle, 0, values[:even])
            if even < values.nbytes:
                device.queue.write_buffer(buffer.handle, even, bytes(values[even:]).ljust(4, b"\0"))
        return buffer

    def download(self, buffer: Buffer, values: Any) -> None:
        """Copy a buffer to a NumPy array of bytes, in pieces through memory that both sides can access."""
        for start in range(0, values.nbytes, STAGING_BYTES):
            part = values[start : start + STAGING_BYTES]
            with self._calls(buffer) as device:
                staging = self._staging_buffer(device)
                encoder = device.create_command_encoder()
                size = padded_bytes(part.nbytes)
                encoder.copy_buffer_to_buffer(buffer.handle, start, staging, 0, size)
                device.queue.submit([encoder.finish()])
                staging.map_sync("READ", 0, size)
                try:
                    part[:] = staging.read_mapped(0, size, copy=False)[: part.nbytes]
                finally:
                    staging.unmap()

    def _staging_buffer(self, device: Any) -> Any:
        if self._staging is None:
            usage = self.wgpu.BufferUsage
            self._staging = device.create_buffer(size=STAGING_BYTES, usage=usage.MAP_READ | usage.COPY_DST)
        return self._staging

    def _require_fits(self, nbytes: int) -> None:
        if padded_bytes(nbytes) > self.largest_bytes:
            raise KernelsFailed(
                "webgpu",
                f"an array has {nbytes} bytes; {self.info['device']} allows at most {self.largest_bytes}",
                "call it on fewer rows at a time",
            )

    # The device, and its errors

    def finish(self) -> None:
        """Wait until everything submitted has been computed."""
        with self._lock:
            if self._device is not None:  # wgpu 0.32 cannot wait for the queue itself: TypeError
                self.download(self.allocate(4), np.empty(4, np.uint8))

    def release(self) -> None:
        """Release compiled kernels and the memory of copies. The next call creates them again."""
        self.finish()
        self._forget()

    def failure(self, error: Exception) -> PolyfleetError:
        """Convert a driver's error for the user. After a lost device the next call gets another."""
        if LOST in str(error):
            with self._lock:
                self._forget()
                self._device = self.adapter = None
            remedy = "call it again; arrays that were on the device must be moved there again with to_device()"
            return KernelsFailed("webgpu", f"the device of {self.info['device']} was lost", remedy)
        if is_memory_error(error):
            return _out_of_memory(summary(error))
        return KernelsFailed("webgpu", f"{type(error).__name__}: {summary(error)}", REMEDY)

    @contextmanager
    def _calls(self, *buffers: Buffer | None) -> Iterator[Any]:
        """Hold the lock, and yield the device. Raises KernelsFailed: driver's errors, memory of a lost device."""
        check_process()
        with self._lock:
            if self._device is None:
                self._device = self._open()
            if any(one is not None and one.device is not self._device for one in buffers):
                raise KernelsFailed(
                    "webgpu", "an array was on a device that is lost", "move it there again with to_device()"
                )
            try:
                yield self._device
            except PolyfleetError:
                raise
            except Exception as e:
                self._staging = None  # it may still be mapped
                raise self.failure(e) from e

    def _open(self) -> Any:
        adapter = self.adapter or find_adapter(self.info["device"])
        return adapter.request_device_sync(required_limits={name: adapter.limits[name] for name in LIMITS})

    def _forget(self) -> None:
        self._staging = None


def is_memory_error(error: Exception) -> bool:
    """Return whether memory is missing. wgpu-native raises a validation error for buffers."""
    return isinstance(error, MemoryError) or NO_MEMORY in str(error)


def _out_of_memory(reason: str) -> KernelsFailed:
    return KernelsFailed("webgpu", f"the device is out of memory: {reason}", "call it on fewer rows at a time")


def padded_bytes(nbytes: int) -> int:
    """Round up to quads of float32, at least one: kernels load four values at a time."""
    return max(-(-nbytes // PADDING_BYTES), 1) * PADDING_BYTES


def summary(error: Exception) -> str:
    """Return what an error of wgpu says, without its headings, in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line not in ("", "Validation Error", "Caused by:"))[:300]
