"""Kernels in OpenCL C, for any device with a driver: sources/opencl_*.cl.

Each has two forms: "items", with a row per work-item, for CPUs; "groups", with a work-group per row and matrix tiles in
local memory, for GPUs. Sums are accumulated in float32 in at least sixteen parts. Gradients use formulas in torch.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.errors import PolyfleetError
from workers.errors import KernelsFailed
from workers.kernels.arrays import Resident, mask_strides
from workers.kernels.base import KernelBackend
from workers.kernels.device import OwnMemory
from workers.kernels.drivers import opencl_driver as driving
from workers.kernels.drivers.opencl_arrays import Array, allocate, as_bytes, copy_back, copy_tensor, import_tensor

long, real, flag = np.int64, np.float32, np.int32
MASKS = {torch.bool: 1, torch.float32: 2}


class Kernels(OwnMemory, KernelBackend):
    """Kernels in OpenCL C. `on`: part of the name of an OpenCL device ("": the first, GPUs before CPUs). `form`:
    "items" or "groups" ("": by device). torch's tensors are in the CPU's memory; `to_device` puts an array on the
    device.
    """

    name = "opencl"

    def __init__(self, device: Any = None, *, on: str = "", form: str = ""):
        super().__init__(device)
        self.driver = driving.Driver(driving.find_device(on), form)
        self.flushes_subnormals = not self.driver.device.single_fp_config & self.driver.cl.device_fp_config.DENORM

    @classmethod
    def unavailable_reason(cls) -> str:
        return driving.unavailable_reason()

    def device_info(self) -> dict[str, Any]:
        """Describe the device. `form`: how rows are distributed; `largest_array_bytes`: the driver's limit."""
        device = self.driver.device
        return {
            "device": "cpu",
            "device_name": device.name.strip(),
            "driver": device.platform.name.strip(),
            "version": device.driver_version.strip(),
            "compiler": device.opencl_c_version.strip(),
            "form": self.driver.form,
            "compute_units": int(device.max_compute_units),
            "memory_bytes": int(device.global_mem_size),
            "largest_array_bytes": self.driver.largest_bytes,
        }

    def synchronize(self) -> None:
        self.driver.check_process()
        self.driver.queue.finish()

    def close(self) -> None:
        self.driver.release_kernels()

    def free_bytes(self) -> int | None:
        """Free memory of a CPU device; None for a GPU, since OpenCL does not report it."""
        return super().free_bytes() if self.driver.on_cpu else None

    # Memory

    def _uploaded(self, tensor: Tensor) -> Any:
        return self._call_driver(copy_tensor, tensor)

    def _download(self, buffer: Any, host: Tensor) -> None:
        self.driver.check_process()
        self._call_driver(lambda driver: driver.cl.enqueue_copy(driver.queue, as_bytes(host), buffer))

    def _imported(self, tensor: Tensor, written: bool = False) -> Array:
        array: Array = self._call_driver(import_tensor, tensor, written)
        return array

    def _exported(self, array: Array, tensor: Tensor) -> None:
        copy_back(self.driver, array, tensor)

    def _viewed(self, buffer: Any, like: Tensor) -> Array:
        return Array(buffer, like.shape, like.dtype)

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Resident:
        return Resident(self, shape, dtype, self._call_driver(allocate, shape.numel() * dtype.itemsize))

    def _call_driver(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(self.driver, *arguments)
        except PolyfleetError:
            raise
        except Exception as e:
            raise self._failure(e) from e

    def _failure(self, error: Exception) -> PolyfleetError:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if isinstance(error, (MemoryError, self.driver.cl.MemoryError)):
            return KernelsFailed(self.name, f"the device is out of memory: {reason}", "call it on fewer rows at a time")
        return KernelsFailed(self.name, reason, "use kernels 'torch', and open an issue with the driver and the call")

    # Launches

    def _rows(self, kernel: str, count: int, x: Array, weights: Array | None, *arguments: Any) -> None:
        self._launch("rows", kernel, (x, weights), count, self._local, *arguments)

    def _launch(
        self, program: str, kernel: str, of: tuple[Array, Array | None], count: int, local: int, *arguments: Any
    ) -> None:
        x, weights = of
        letters = x.letters, (weights or x).letters
        plain = (one.buffer if isinstance(one, Array) else one for one in arguments)
        self.driver.launch(program, kernel, letters, count, local, *plain)

    @cached_property
    def _local(self) -> int:
        """Number of work-items in the group of a row."""
        return 1 if self.driver.form == "items" else self.driver.group

    # Rows

    def _rmsnorm(
        self, x_RC: Array, weight_C: Array | None, out_RC: Array, eps: float, offset: float, round_before_weight: bool
    ) -> None:
        rows, columns = x_RC.shape
        options = real(eps), real(offset), flag(weight_C is not None), flag(round_before_weight)
        self._rows("rmsnorm", rows, x_RC, weight_C, x_RC, weight_C, out_RC, long(columns), *options)

    def _layernorm(self, x_RC: Array, weight_C: Array | None, bias_C: Array | None, out_RC: Array, eps: float) -> None:
        rows, columns = x_RC.shape
        weight_C, bias_C = self._same_dtype(weight_C, bias_C)
        options = real(eps), flag(weight_C is not None), flag(bias_C is not None)
        self._rows("layernorm", rows, x_RC, weight_C or bias_C, x_RC, weight_C, bias_C, out_RC, long(columns), *options)

    def _same_dtype(self, weight: Array | None, bias: Array | None) -> tuple[Array | None, Array | None]:
        """Convert both to one dtype, since programs are built with one for both."""
        if weight is None or bias is None or weight.dtype == bias.dtype:
            return weight, bias
        wide = (self.to_host(Resident(self, one.shape, one.dtype, one.buffer)).float() for one in (weight, bias))
        first, second = (Array(self._call_driver(copy_tensor, one), one.shape, one.dtype) for one in wide)
        return first, second

    def _softmax(self, x_RC: Array, out_RC: Array) -> None:
        rows, columns = x_RC.shape
        self._rows("softmax", rows, x_RC, None, x_RC, out_RC, long(columns))

    # Values

    def _silu(self, x_RC: Array, out_RC: Array) -> None:
        self._each_value("silu", x_RC, out_RC)

    def _swiglu(self, gate_RC: Array, up_RC: Array, out_RC: Array) -> None:
        self._each_value("swiglu", gate_RC, up_RC, out_RC)

    def _each_value(self, kernel: str, *arrays: Array) -> None:
        count, each = arrays[0].numel(), self.driver.each
        local = 1 if each > 1 else 0
        self._launch("gates", kernel, (arrays[0], None), -(-count // each), local, *arrays, long(count))

    def _rope(self, x_BTD: Array, cos_SP: Array, sin_SP: Array, out_BTD: Array, position: int, pairs: bool) -> None:
        batch, length, width = x_BTD.shape
        count = cos_SP.shape[1]
        sizes = long(length), long(width), long(count), long(position), flag(pairs)
        items = batch * length * (width - count)
        self._launch("gates", "rope", (x_BTD, cos_SP), items, 0, x_BTD, cos_SP, sin_SP, out_BTD, *sizes)

    # Products

    def _matmul(self, a_BMK: Array, b_BKN: Array, out_BMN: Array, a_transposed: bool, b_transposed: bool) -> None:
        depth = a_BMK.shape[1 if a_transposed else 2]
        self._product(a_BMK, b_BKN, out_BMN, out_BMN.shape, depth, 1, 1.0, a_transposed, b_transposed)

    def _scores(self, q_BHTD: Array, k_BGSD: Array, out_BHTS: Array, scale: float) -> None:
        batch, heads, length, width = q_BHTD.shape
        shape = batch * heads, length, k_BGSD.shape[2]
        self._product(q_BHTD, k_BGSD, out_BHTS, shape, width, heads // k_BGSD.shape[1], scale, False, True)

    def _product(
        self, a: Array, b: Array, out: Array, shape: Any, depth: int, share: int, scale: float, a_t: bool, b_t: bool
    ) -> None:
        batch, rows, columns = shape
        tile = self.driver.tile
        if self.driver.form == "items":
            count, local = batch * rows * -(-columns // 16), 1
        else:
            count, local = batch * -(-rows // tile) * -(-columns // tile), tile * tile
        sizes = long(rows), long(columns), long(depth), long(share), real(scale), flag(a_t), flag(b_t)
        self._launch("products", "matmul", (a, None), count, local, a, b, out, *sizes)

    def _matmul_vec(self, a_BMK: Array, x_BK: Array, out_BM: Array) -> None:
        batch, rows, depth = a_BMK.shape
        sizes = long(rows), long(depth)
        self._launch("products", "matmul_vec", (a_BMK, None), batch * rows, self._local, a_BMK, x_BK, out_BM, *sizes)

    def _weighted_sum_rows(self, weights_BT: Array, rows_BTD: Array, out_BD: Array) -> None:
        batch, length, width = rows_BTD.shape
        each = 16 if self.driver.form == "items" else self.driver.group
        count = batch * -(-width // each)
        arrays = weights_BT, rows_BTD, out_BD
        sizes = long(length), long(width)
        self._launch("products", "weighted_sum_rows", (rows_BTD, None), count, self._local, *arrays, *sizes)

    # Attention

    def _attention(
        self,
        q_BHTD: Array,
        k_BGSD: Array,
        v_BGSE: Array,
        mask_BHTS: Array | None,
        out_BHTE: Array,
        lse_BHT: Array | None,
        scale: float,
        causal: bool,
    ) -> None:
        batch, heads, length, width = q_BHTD.shape
        groups, many, wide = v_BGSE.shape[1:]
        rows = batch * heads * length
        sums = self._call_driver(allocate, rows * wide * 4)
        kind = 0 if mask_BHTS is None else MASKS.get(mask_BHTS.dtype, 3)
        sizes = map(long, (length, many, heads, groups, width, wide))
        self._launch(
            "attention", "attention", (q_BHTD, None), rows, self._local, q_BHTD, k_BGSD, v_BGSE, mask_BHTS, out_BHTE,
            lse_BHT, sums, *sizes, real(scale), flag(causal), flag(kind), *map(long, mask_strides(mask_BHTS)),
            flag(lse_BHT is not None),
        )  # fmt: skip
