"""Kernels in WGSL, for any device with a WebGPU adapter (Vulkan, Metal, Direct3D 12): sources/webgpu_*.wgsl.

A work-group computes a row, or a tile of a matrix. Sums are accumulated in float32 in parts that a tree adds. Gradients
use formulas in torch.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cluster.errors import PolyfleetError
from workers.errors import KernelsFailed
from workers.kernels.arrays import Resident, mask_strides
from workers.kernels.base import KernelBackend
from workers.kernels.device import OwnMemory
from workers.kernels.drivers import webgpu_adapters
from workers.kernels.drivers.webgpu_arrays import Array, as_bytes, import_tensor, parts, require_bindable
from workers.kernels.drivers.webgpu_driver import TILE, Driver

VALUES = 4
"""Number of neighbouring values that an invocation computes."""
INVOCATIONS_ACROSS, TERMS_PER_TILE = 8, 16
"""Invocations beside each other in weighted_sum_rows, and terms of a sum in a tile of matmul."""
NO_MASK, BOOL_MASK, ADDED_MASK = 0, 1, 2


class Kernels(OwnMemory, KernelBackend):
    """Kernels in WGSL. `on`: part of the name of an adapter ("": the first, GPUs before CPUs). torch's tensors are in
    the CPU's memory and are copied in each call; `to_device` puts an array on the device.
    """

    name = "webgpu"

    def __init__(self, device: Any = None, *, on: str = ""):
        super().__init__(device)
        self.driver = Driver(webgpu_adapters.find_adapter(on))

    @classmethod
    def unavailable_reason(cls) -> str:
        return webgpu_adapters.unavailable_reason()

    @cached_property
    def flushes_subnormals(self) -> bool:  # type: ignore[override]
        """WGSL allows it; computed once: 1e-39 / sqrt(0 + 1e-6) is 1e-36, or 0 if the device flushes."""
        return not self.rmsnorm(torch.full((1, 1), 1e-39)).item()

    def device_info(self) -> dict[str, Any]:
        """Describe the adapter. `largest_array_bytes`: what a kernel can bind; rows of larger arrays are split."""
        info = self.driver.info
        return {
            "device": "cpu",
            "device_name": info["device"],
            "driver": f"{info['backend_type']} {info['vendor']}".strip(),
            "version": info["description"],
            "compiler": f"wgpu {self.driver.wgpu.__version__}",
            "adapter_type": info["adapter_type"],
            "group": self.driver.group,
            "largest_array_bytes": self.driver.largest_binding_bytes,
        }

    def synchronize(self) -> None:
        webgpu_adapters.check_process()
        self.driver.finish()

    def close(self) -> None:
        self.driver.release()

    def free_bytes(self) -> int | None:
        """Free memory of a CPU adapter; None for a GPU, since WebGPU does not provide it."""
        return super().free_bytes() if self.driver.on_cpu else None

    # Memory

    def _uploaded(self, tensor: Tensor) -> Any:
        return import_tensor(self.driver, tensor, written=False).buffer

    def _download(self, buffer: Any, host: Tensor) -> None:
        self.driver.download(buffer, as_bytes(host))

    def _imported(self, tensor: Tensor, written: bool = False) -> Array:
        return import_tensor(self.driver, tensor, written)

    def _exported(self, array: Array, tensor: Tensor) -> None:
        self.driver.download(array.buffer, as_bytes(tensor))

    def _viewed(self, buffer: Any, like: Tensor) -> Array:
        return Array(buffer, like.shape, like.dtype)

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Resident:
        return Resident(self, shape, dtype, self.driver.allocate(shape.numel() * dtype.itemsize))

    def _failure(self, error: Exception) -> PolyfleetError:
        return self.driver.failure(error)

    # Rows

    def _rmsnorm(
        self, x_RC: Array, weight_C: Array | None, out_RC: Array, eps: float, offset: float, round_before_weight: bool
    ) -> None:
        options = eps, offset, weight_C is not None, round_before_weight
        self._rows("rmsnorm", x_RC, out_RC, options, loops=2, weight=weight_C)

    def _layernorm(self, x_RC: Array, weight_C: Array | None, bias_C: Array | None, out_RC: Array, eps: float) -> None:
        options = eps, weight_C is not None, bias_C is not None
        self._rows("layernorm", x_RC, out_RC, options, loops=3, weight=weight_C, bias=bias_C)

    def _softmax(self, x_RC: Array, out_RC: Array) -> None:
        self._rows("softmax", x_RC, out_RC, (), loops=3)

    def _rows(
        self, kernel: str, x_RC: Array, out_RC: Array, options: tuple[Any, ...], loops: int, **vectors: Array | None
    ) -> None:
        """Dispatch a work-group per row. `loops`: how often a kernel reads the row; vectors that are None have a
        binding, too, which the kernel does not read.
        """
        width = x_RC.shape[1]
        self._require_steps("columns", width, loops, self.driver.group * VALUES)
        for x, out in parts(self.driver, x_RC, out_RC):
            inputs = {"x": x, **{name: one or x for name, one in vectors.items()}}
            self.driver.dispatch(kernel, x.shape[0], (width, *options), inputs, {"out": out})

    def _require_steps(self, name: str, count: int, loops: int, at_once: int) -> None:
        """Raise KernelsFailed if an invocation would need more loop iterations than the device computes."""
        most = self.driver.max_steps // loops * at_once
        if count > most:
            reason = f"a row has {count} {name}; {self.driver.info['device']} computes at most {most} correctly"
            raise KernelsFailed(self.name, reason, "use kernels 'torch', or another adapter")

    # Values

    def _silu(self, x_RC: Array, out_RC: Array) -> None:
        for x, out in parts(self.driver, *map(_flat, (x_RC, out_RC))):
            self._each_value("silu", (False,), {"x": x, "up": x}, out)

    def _swiglu(self, gate_RC: Array, up_RC: Array, out_RC: Array) -> None:
        for gate, up, out in parts(self.driver, *map(_flat, (gate_RC, up_RC, out_RC))):
            self._each_value("silu", (True,), {"x": gate, "up": up}, out)

    def _rope(self, x_BTD: Array, cos_SP: Array, sin_SP: Array, out_BTD: Array, position: int, pairs: bool) -> None:
        _, length, width = x_BTD.shape
        require_bindable(self.driver, cos=cos_SP, sin=sin_SP)
        first = 0
        for x, out in parts(self.driver, _merged(x_BTD), _merged(out_BTD)):
            options = first, length, width, cos_SP.shape[1], position, pairs
            self._each_value("rope", options, {"x": x, "cos": cos_SP, "sin": sin_SP}, out)
            first += x.shape[0]

    def _each_value(self, kernel: str, options: tuple[Any, ...], inputs: dict[str, Array], out: Array) -> None:
        groups = -(-out.numel() // (self.driver.group * VALUES))
        self.driver.dispatch(kernel, groups, (out.numel(), *options), inputs, {"out": out})

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
        batch, height, width = shape
        groups = batch * -(-height // TILE) * -(-width // TILE)
        # an invocation needs 1.6 iterations for a term: one to add it, and some to fill the tile
        many = min(self.driver.max_steps // TERMS_PER_TILE * TERMS_PER_TILE // 2, 1 << 30)
        sums = self._scratch(batch * height * width if depth > many else 1)
        require_bindable(self.driver, a=a, b=b, out=out, sums=sums)
        for first in range(0, max(depth, 1), many):
            options = height, width, depth, share, first, min(first + many, depth), scale, a_t, b_t
            self.driver.dispatch("matmul", groups, options, {"a": a, "b": b}, {"out": out, "sums": sums})

    def _matmul_vec(self, a_BMK: Array, x_BK: Array, out_BM: Array) -> None:
        batch, rows, depth = a_BMK.shape
        require_bindable(self.driver, a=a_BMK, x=x_BK, out=out_BM)
        self._require_steps("columns", depth, 1, self.driver.group * VALUES)
        self.driver.dispatch("matmul_vec", batch * rows, (rows, depth), {"a": a_BMK, "x": x_BK}, {"out": out_BM})

    def _weighted_sum_rows(self, weights_BT: Array, rows_BTD: Array, out_BD: Array) -> None:
        batch, length, width = rows_BTD.shape
        require_bindable(self.driver, weights=weights_BT, rows=rows_BTD, out=out_BD)
        self._require_steps("weights", length, 1, self.driver.group // INVOCATIONS_ACROSS)
        groups = batch * -(-width // (INVOCATIONS_ACROSS * VALUES))
        inputs = {"weights": weights_BT, "rows": rows_BTD}
        self.driver.dispatch("weighted_sum_rows", groups, (length, width), inputs, {"out": out_BD})

    def _scratch(self, count: int) -> Array:
        """Allocate float32 values for results that are not complete."""
        return Array(self.driver.allocate(count * 4), torch.Size((count,)), torch.float32)

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
        state = self._scratch(rows * (wide + 2))
        require_bindable(self.driver, q=q_BHTD, k=k_BGSD, v=v_BGSE, mask=mask_BHTS, out=out_BHTE, state=state)
        kind = NO_MASK if mask_BHTS is None else BOOL_MASK if mask_BHTS.dtype == torch.bool else ADDED_MASK
        inputs = {"q": q_BHTD, "k": k_BGSD, "v": v_BGSE, "mask": mask_BHTS or q_BHTD}
        outputs = {"out": out_BHTE, "lse": lse_BHT or self._scratch(1), "state": state}
        keys = self._keys_at_once(width, wide)
        for first in range(0, max(many, 1), keys):
            options = (
                *(length, many, heads, groups, width, wide, first, min(first + keys, many), scale, causal, kind),
                *mask_strides(mask_BHTS), lse_BHT is not None, self._across(wide),
            )  # fmt: skip
            self.driver.dispatch("attention", rows, options, inputs, outputs)

    def _across(self, wide: int) -> int:
        """Return how many invocations compute the values of a row, four each: a power of two."""
        return min(self.driver.group, 1 << (-(-wide // VALUES) - 1).bit_length())

    def _keys_at_once(self, width: int, wide: int) -> int:
        """Return how many keys an invocation may read in one dispatch. Raises KernelsFailed if not even a group."""
        group, across = self.driver.group, self._across(wide)
        blocks = -(-wide // (across * VALUES))
        steps = 1 + -(-width // VALUES) + 2 * group.bit_length() + blocks * (across + group.bit_length())
        self._require_steps("values and keys", steps, 2, 1)
        return min(self.driver.max_steps // 2 // steps, 1 << 20) * group


def _flat(array: Array) -> Array:
    return Array(array.buffer, torch.Size((array.numel(),)), array.dtype)


def _merged(array_BTD: Array) -> Array:
    """Return the rows of an array of three dimensions."""
    shape = torch.Size((array_BTD.shape[:2].numel(), array_BTD.shape[2]))
    return Array(array_BTD.buffer, shape, array_BTD.dtype)
