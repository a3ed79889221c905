"""Kernels in Triton: one source for GPUs of NVIDIA, AMD and Intel, in sources/triton_*.py.

With TRITON_INTERPRET=1 they are interpreted on the CPU, for tests: correct but slow. compilation/triton_table.py
chooses the configuration, which is launched only if it was compiled ahead of time without register spills. Double
precision is not supported.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cluster.errors import PolyfleetError
from workers.errors import KernelsFailed
from workers.kernels.compilation import triton_table as table
from workers.kernels.compilation.triton_table import Config
from workers.kernels.device import as_device
from workers.kernels.drivers import triton_launch as launching
from workers.kernels.drivers.triton_gradients import TritonGradients, mask_arguments

MAX_PROGRAMS = (1 << 31) - 1
"""Limit of a grid's first dimension (CUDA C++ Programming Guide, "Technical Specifications"); same for HIP."""


class Kernels(TritonGradients):
    """Kernels in Triton. `target`: which lines of the table are used (None: the device's; interpreted: sm_90)."""

    name = "triton"

    def __init__(self, device: Any = None, *, target: str | None = None):
        super().__init__(device)
        own = table.TARGETS["sm_90"] if self.device.type == "cpu" else launching.target_of(self.device)
        self.target = own if target is None else table.target(target)
        self.interpreted = self.device.type == "cpu"
        self.flushes_subnormals = self.interpreted  # the interpreter's conversion to bfloat16 corrupts them
        self.launch = launching.KernelLauncher(self.device, self.target)
        self.version = launching.installed() or (0, 0)
        self._forms = lru_cache(None)(table.rows)

    @classmethod
    def unavailable_reason(cls) -> str:
        return launching.unavailable_reason()

    def device_info(self) -> dict[str, Any]:
        import triton

        name = "Triton's interpreter" if self.interpreted else _module(self.device).get_device_name(self.device)
        return {
            "device": str(self.device),
            "device_name": name,
            "driver": "triton",
            "version": triton.__version__,
            "target": self.target.name,
            "interpreted": self.interpreted,
        }

    def synchronize(self) -> None:
        if not self.interpreted:
            _module(self.device).synchronize(self.device)

    def close(self) -> None:
        self.launch.close()
        self._forms.cache_clear()

    def _device(self, device: Any) -> torch.device:
        return launching.resolve_device(None if device is None else as_device(device))

    def _failure(self, error: Exception) -> PolyfleetError:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if isinstance(error, torch.OutOfMemoryError):
            return KernelsFailed(self.name, reason, "call it on fewer rows at a time")
        return KernelsFailed(self.name, reason, "use kernels 'torch', and open an issue with the call and the device")

    def rows(self, operation: str, columns: int) -> Config:
        """Return the configuration for rows of `columns` values."""
        return self._forms(operation, columns, self.target, self.version)

    def _rmsnorm(
        self,
        x_RC: Tensor,
        weight_C: Tensor | None,
        out_RC: Tensor,
        eps: float,
        offset: float,
        round_before_weight: bool,
    ) -> None:
        count, columns = x_RC.shape
        config = self.rows("rmsnorm", columns)
        self.launch(
            config, x_RC.dtype, _grid(count, config), x_RC, x_RC if weight_C is None else weight_C, out_RC, count,
            columns, eps, offset, HAS_WEIGHT=weight_C is not None, ROUNDED=round_before_weight,
        )  # fmt: skip

    def _layernorm(
        self, x_RC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, out_RC: Tensor, eps: float
    ) -> None:
        count, columns = x_RC.shape
        config = self.rows("layernorm", columns)
        vectors = (x_RC if one is None else one for one in (weight_C, bias_C))
        self.launch(
            config, x_RC.dtype, _grid(count, config), x_RC, *vectors, out_RC, count, columns, eps,
            HAS_WEIGHT=weight_C is not None, HAS_BIAS=bias_C is not None,
        )  # fmt: skip

    def _softmax(self, x_RC: Tensor, out_RC: Tensor) -> None:
        count, columns = x_RC.shape
        config = self.rows("softmax", columns)
        self.launch(config, x_RC.dtype, _grid(count, config), x_RC, out_RC, count, columns)

    def _silu(self, x_RC: Tensor, out_RC: Tensor) -> None:
        self._each_value("silu", x_RC, out_RC)

    def _swiglu(self, gate_RC: Tensor, up_RC: Tensor, out_RC: Tensor) -> None:
        self._each_value("swiglu", gate_RC, up_RC, out_RC)

    def _each_value(self, kernel: str, *arrays: Tensor) -> None:
        first = arrays[0]
        config = table.gate(kernel, first.element_size(), self.target)
        count = first.numel()
        self.launch(config, first.dtype, (_blocks(count, config.blocks[0]),), *arrays, count)

    def _rope(self, x_BTD: Tensor, cos_SP: Tensor, sin_SP: Tensor, out_BTD: Tensor, position: int, pairs: bool) -> None:
        batch, length, width = x_BTD.shape
        count = cos_SP.shape[1]
        config = table.rope(count)
        rest = 2 * count < width and out_BTD.data_ptr() != x_BTD.data_ptr()
        self.launch(
            config, x_BTD.dtype, _grid(batch * length, config), x_BTD, cos_SP, sin_SP, out_BTD, batch * length, length,
            width, count, position, PAIRS=pairs, REST=rest,
        )  # fmt: skip

    def _matmul(self, a_BMK: Tensor, b_BKN: Tensor, out_BMN: Tensor, a_transposed: bool, b_transposed: bool) -> None:
        depth = a_BMK.shape[1] if a_transposed else a_BMK.shape[2]
        self._product(a_BMK, b_BKN, out_BMN, depth, 1, 1.0, a_transposed, b_transposed)

    def _scores(self, q_BHTD: Tensor, k_BGSD: Tensor, out_BHTS: Tensor, scale: float) -> None:
        heads, groups = q_BHTD.shape[1], k_BGSD.shape[1]
        self._product(q_BHTD, k_BGSD, out_BHTS.flatten(0, 1), q_BHTD.shape[3], heads // groups, scale, False, True)

    def _product(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        depth: int,
        share: int,
        scale: float,
        a_transposed: bool,
        b_transposed: bool,
    ) -> None:
        batch, rows, columns = out.shape
        config = table.matmul(rows, columns, depth, a.element_size(), self.target)
        programs = batch * -(-rows // config.blocks[0]) * -(-columns // config.blocks[1])
        self.launch(
            config, a.dtype, (_check_programs(programs),), a, b, out, rows, columns, depth, share, scale,
            A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed, IN_FLOAT32=self.interpreted,
        )  # fmt: skip

    def _matmul_vec(self, a_BMK: Tensor, x_BK: Tensor, out_BM: Tensor) -> None:
        batch, rows, depth = a_BMK.shape
        config = table.matmul_vec(depth)
        programs = _check_programs(batch * _blocks(rows, config.blocks[0]))
        self.launch(config, a_BMK.dtype, (programs,), a_BMK, x_BK, out_BM, rows, depth)

    def _weighted_sum_rows(self, weights_BT: Tensor, rows_BTD: Tensor, out_BD: Tensor) -> None:
        batch, length, width = rows_BTD.shape
        config = table.weighted_sum_rows(width)
        programs = _check_programs(batch * _blocks(width, config.blocks[1]))
        self.launch(config, rows_BTD.dtype, (programs,), weights_BT, rows_BTD, out_BD, length, width)

    def _attention(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask_BHTS: Tensor | None,
        out_BHTE: Tensor,
        lse_BHT: Tensor | None,
        scale: float,
        causal: bool,
    ) -> None:
        batch, heads, length, width = q_BHTD.shape
        groups, many, values = v_BGSE.shape[1:]
        config = table.attention("attention", width, values, q_BHTD.element_size(), self.target, mask_BHTS is not None)
        mask, strides, mask_kind = mask_arguments(mask_BHTS, q_BHTD)
        programs = _check_programs(batch * heads * _blocks(length, config.blocks[0]))
        self.launch(
            config, q_BHTD.dtype, (programs,), q_BHTD, k_BGSD, v_BGSE, mask, out_BHTE,
            out_BHTE if lse_BHT is None else lse_BHT, length, many, heads, heads // groups, scale, *strides,
            D=width, E=values, CAUSAL=causal, MASK=mask_kind, HAS_LSE=lse_BHT is not None, IN_FLOAT32=self.interpreted,
        )  # fmt: skip


def _grid(count: int, config: Config) -> tuple[int]:
    return (_blocks(count, config.blocks[0] if len(config.blocks) > 1 else 1),)


def _blocks(count: int, size: int) -> int:
    return _check_programs(-(-count // size))


def _check_programs(programs: int) -> int:
    if programs > MAX_PROGRAMS:
        raise KernelsFailed(
            "triton",
            f"{programs} programs; a grid can have at most {MAX_PROGRAMS}",
            "call it on fewer rows at a time",
        )
    return programs


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device.type)
