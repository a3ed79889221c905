"""Kernels for TPUs in JAX's Pallas: norms, softmax and attention, in sources/pallas_*.py.

XLA compiles all other operations (sources/pallas_plain.py): they gain nothing from Pallas. Without a TPU, kernels are
interpreted on the CPU, for tests: correct but slow. Gradients use formulas in torch, on the CPU.
"""

from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.errors import PolyfleetError, UserError
from workers.errors import KernelsFailed
from workers.kernels.arrays import Resident
from workers.kernels.base import KernelBackend
from workers.kernels.compilation import pallas_blocks as planning
from workers.kernels.device import OwnMemory
from workers.kernels.drivers import pallas_driver as driving
from workers.kernels.drivers.pallas_arrays import Array, Buffer, as_numpy, fill_tensor

LARGEST_DIMENSION = (1 << 31) - 1
"""JAX's indices within a dimension are 32 bits wide; offsets in memory are 64."""


class Kernels(OwnMemory, KernelBackend):
    """Kernels in Pallas. `platform`: JAX's "tpu" or "cpu" ("": a TPU if there is one); `vmem_bytes`: how much vector
    memory blocks may use. torch's tensors are in the CPU's memory; `to_device` puts an array on the TPU.
    """

    name = "pallas"

    def __init__(self, device: Any = None, *, platform: str = "", vmem_bytes: int = planning.BUDGET_BYTES):
        super().__init__(device)
        most = planning.VMEM_LIMIT_BYTES - 1
        if isinstance(vmem_bytes, bool) or not isinstance(vmem_bytes, int) or not 1 <= vmem_bytes <= most:
            raise UserError(f"vmem_bytes is {vmem_bytes!r}", f"write an integer from 1 to {most}")
        self.vmem_bytes = vmem_bytes
        self.driver = driving.Driver(driving.find_device(platform))
        self.interpreted = self.driver.interpreted
        self.flushes_subnormals = True  # TPUs do, and so does XLA on CPUs

    @classmethod
    def unavailable_reason(cls) -> str:
        return driving.unavailable_reason()

    def device_info(self) -> dict[str, Any]:
        """Describe the device. `vmem_bytes`: the budget of blocks."""
        import jax

        return {
            "device": "cpu",
            "device_name": "Pallas' interpreter" if self.interpreted else self.driver.device.device_kind,
            "driver": "jax",
            "version": jax.__version__,
            "compiler": f"jaxlib {version('jaxlib')}",
            "platform": self.driver.device.platform,
            "interpreted": self.interpreted,
            "vmem_bytes": self.vmem_bytes,
        }

    def close(self) -> None:
        self.driver.release()

    def free_bytes(self) -> int | None:
        """Return the TPU's free memory, None if unknown; interpreted, the CPU's."""
        if self.interpreted:
            return super().free_bytes()
        about = self.driver.device.memory_stats() or {}
        return int(about["bytes_limit"] - about["bytes_in_use"]) if "bytes_limit" in about else None

    # Memory

    def _uploaded(self, tensor: Tensor) -> Buffer:
        return Buffer(self._call_driver(self.driver.put, as_numpy(tensor.clone())))  # JAX may use this memory itself

    def _download(self, buffer: Any, host: Tensor) -> None:
        self._call_driver(fill_tensor, host, buffer.value)

    def synchronize(self) -> None:
        """Wait for the device. A TPU runs programs in order: when a new one has ended, all before it have."""
        if not self.interpreted:
            self.driver.put(np.zeros(1, np.float32)).block_until_ready()

    def _imported(self, tensor: Tensor, written: bool = False) -> Array:
        if max(tensor.shape, default=0) > LARGEST_DIMENSION:
            raise KernelsFailed(
                self.name,
                f"a dimension of {list(tensor.shape)} is greater than {LARGEST_DIMENSION}",
                "call it on fewer rows at a time",
            )
        value = None if written else self._call_driver(self.driver.put, as_numpy(tensor))
        return Array(Buffer(value), tensor.shape, tensor.dtype)

    def _exported(self, array: Array, tensor: Tensor) -> None:
        fill_tensor(tensor, array.buffer.value)

    def _viewed(self, buffer: Any, like: Tensor) -> Array:
        return Array(buffer, like.shape, like.dtype)

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Resident:
        empty = Resident(self, shape, dtype, Buffer())
        if not shape.numel():  # no kernel will fill it
            empty.buffer.value = self._call_driver(self.driver.put, as_numpy(torch.empty(shape, dtype=dtype)))
        return empty

    def _call_driver(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except PolyfleetError:
            raise
        except Exception as e:
            raise self._failure(e) from e

    def _failure(self, error: Exception) -> PolyfleetError:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in reason:
            return KernelsFailed(self.name, f"the device is out of memory: {reason}", "call it on fewer rows at a time")
        return KernelsFailed(self.name, reason, "use kernels 'torch', and open an issue with the call and the device")

    # Rows

    def _rmsnorm(
        self, x_RC: Array, weight_C: Array | None, out_RC: Array, eps: float, offset: float, round_before_weight: bool
    ) -> None:
        options = {"eps": eps, "offset": offset, "round_before_weight": round_before_weight}
        if x_RC.dtype == torch.float16 and round_before_weight and weight_C is not None:
            normed = self._rows("rmsnorm", x_RC, None, **options)
            out_RC.fill(self.driver.run("plain", "weighted", normed, weight_C.value, offset=offset, dtype="float16"))
            return
        self._store(out_RC, self._rows("rmsnorm", x_RC, weight_C, **options))

    def _layernorm(self, x_RC: Array, weight_C: Array | None, bias_C: Array | None, out_RC: Array, eps: float) -> None:
        self._store(out_RC, self._rows("layernorm", x_RC, weight_C, bias_C, eps=eps))

    def _softmax(self, x_RC: Array, out_RC: Array) -> None:
        self._store(out_RC, self._rows("softmax", x_RC))

    def _rows(self, kernel: str, x: Array, *vectors: Array | None, **options: Any) -> Any:
        blocks = planning.row_blocks(x.shape[0], x.shape[1], _itemsize(x), len(vectors), self.vmem_bytes)
        return self._kernel("rows", kernel, x, *vectors, blocks=blocks, **options)

    def _kernel(self, module: str, name: str, *arrays: Array | None, **constants: Any) -> Any:
        """Run a Pallas kernel. Of float16 it gets, and returns, float32."""
        values = (None if one is None else self._loadable(one) for one in arrays)
        return self.driver.run(module, name, *values, interpret=self.interpreted, **constants)

    def _loadable(self, array: Array) -> Any:
        if array.dtype != torch.float16:
            return array.value
        return self.driver.run("plain", "converted", array.value, dtype="float32")

    def _store(self, out: Array, value: Any) -> None:
        out.fill(self.driver.run("plain", "converted", value, dtype="float16") if out.dtype == torch.float16 else value)

    def _plain(self, out: Array, function: str, *arrays: Array, **constants: Any) -> None:
        out.fill(self.driver.run("plain", function, *(one.value for one in arrays), **constants))

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
        length, width = q_BHTD.shape[2:]
        keys, wide = v_BGSE.shape[2:]
        mask_bytes = 0 if mask_BHTS is None else planning.FLOAT32_BYTES
        blocks = planning.attention_blocks(length, keys, width, wide, _itemsize(q_BHTD), mask_bytes, self.vmem_bytes)
        result, *lse = self._kernel(
            "attention", "attention", q_BHTD, k_BGSD, v_BGSE, mask_BHTS, blocks=blocks, scale=scale, causal=causal,
            return_lse=lse_BHT is not None,
        )  # fmt: skip
        self._store(out_BHTE, result)
        if lse_BHT is not None:
            lse_BHT.fill(lse[0])

    # Operations that XLA compiles

    def _scores(self, q_BHTD: Array, k_BGSD: Array, out_BHTS: Array, scale: float) -> None:
        self._plain(out_BHTS, "scores", q_BHTD, k_BGSD, scale=scale)

    def _silu(self, x_RC: Array, out_RC: Array) -> None:
        self._plain(out_RC, "silu", x_RC)

    def _swiglu(self, gate_RC: Array, up_RC: Array, out_RC: Array) -> None:
        self._plain(out_RC, "swiglu", gate_RC, up_RC)

    def _rope(self, x_BTD: Array, cos_SP: Array, sin_SP: Array, out_BTD: Array, position: int, pairs: bool) -> None:
        arrays = (one.value for one in (x_BTD, cos_SP, sin_SP))
        out_BTD.fill(self.driver.run("plain", "rope", *arrays, np.int32(position), pairs=pairs))

    def _matmul(self, a_BMK: Array, b_BKN: Array, out_BMN: Array, a_transposed: bool, b_transposed: bool) -> None:
        self._plain(out_BMN, "matmul", a_BMK, b_BKN, a_transposed=a_transposed, b_transposed=b_transposed)

    def _matmul_vec(self, a_BMK: Array, x_BK: Array, out_BM: Array) -> None:
        self._plain(out_BM, "matmul_vec", a_BMK, x_BK)

    def _weighted_sum_rows(self, weights_BT: Array, rows_BTD: Array, out_BD: Array) -> None:
        self._plain(out_BD, "weighted_sum_rows", weights_BT, rows_BTD)


def _itemsize(array: Array) -> int:
    """Return the bytes of a value in VMEM: float16 is in float32 there."""
    return planning.FLOAT32_BYTES if array.dtype == torch.float16 else array.dtype.itemsize
