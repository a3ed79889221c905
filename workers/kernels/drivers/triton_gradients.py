"""Backward kernels in Triton, as hooks of implementations/triton.py.

Sums over rows: each of P persistent programs writes one row of a float32 table, and a second kernel adds these rows in
a fixed order, so that runs are bit-identical on devices of one kind.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from workers.kernels.base import KernelBackend
from workers.kernels.compilation import triton_table as table
from workers.kernels.compilation.triton_table import Config
from workers.kernels.drivers.triton_launch import KernelLauncher

Strides = tuple[int, int, int, int]


class TritonGradients(KernelBackend):
    own_gradients = frozenset({"rmsnorm", "layernorm", "softmax", "silu", "swiglu", "attention"})
    launch: KernelLauncher
    target: table.CompileTarget

    @abstractmethod
    def rows(self, operation: str, columns: int) -> Config: ...

    @abstractmethod
    def _each_value(self, kernel: str, *arrays: Tensor) -> None: ...

    def _rmsnorm_backward(
        self, g_RC: Tensor, x_RC: Tensor, weight_C: Tensor | None, eps: float, offset: float
    ) -> tuple[Tensor, Tensor | None]:
        count, columns = x_RC.shape
        config, grad = self.rows("rmsnorm_backward", columns), torch.empty_like(x_RC)
        programs = min(-(-count // config.blocks[0]), self.launch.programs)
        has_weight = weight_C is not None
        partial = x_RC.new_empty((1, programs, columns), dtype=torch.float32) if has_weight else grad
        self.launch(
            config, x_RC.dtype, (programs,), g_RC, x_RC, x_RC if weight_C is None else weight_C, grad, partial, count,
            columns, eps, offset, HAS_WEIGHT=has_weight,
        )  # fmt: skip
        return grad, self._sum_partials(partial, weight_C.dtype)[0] if weight_C is not None else None

    def _layernorm_backward(
        self, g_RC: Tensor, x_RC: Tensor, weight_C: Tensor | None, with_bias: bool, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        count, columns = x_RC.shape
        config, grad = self.rows("layernorm_backward", columns), torch.empty_like(x_RC)
        programs = min(-(-count // config.blocks[0]), self.launch.programs)
        has_weight = weight_C is not None
        summed = has_weight or with_bias
        partial = x_RC.new_empty((2, programs, columns), dtype=torch.float32) if summed else grad
        self.launch(
            config, x_RC.dtype, (programs,), g_RC, x_RC, x_RC if weight_C is None else weight_C, grad, partial, count,
            columns, eps, HAS_WEIGHT=has_weight, HAS_BIAS=with_bias,
        )  # fmt: skip
        if not summed:
            return grad, None, None
        first, last = 0 if has_weight else 1, 2 if with_bias else 1
        sums = self._sum_partials(partial[first:last], x_RC.dtype if weight_C is None else weight_C.dtype)
        return grad, sums[0] if has_weight else None, sums[-1] if with_bias else None

    def _sum_partials(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum partial results [n, P, C] in float32 to [n, C]."""
        many, programs, columns = partial.shape
        out, config = partial.new_empty((many, columns), dtype=dtype), table.add_partials()
        self.launch(config, dtype, (-(-columns // config.blocks[1]), many), partial, out, programs, columns)
        return out

    def _softmax_backward(self, g_RC: Tensor, y_RC: Tensor) -> Tensor:
        count, columns = y_RC.shape
        config, grad = self.rows("softmax_backward", columns), torch.empty_like(y_RC)
        several = config.blocks[0] if len(config.blocks) > 1 else 1
        self.launch(config, y_RC.dtype, (-(-count // several),), g_RC, y_RC, grad, count, columns)
        return grad

    def _silu_backward(self, g_RC: Tensor, x_RC: Tensor) -> Tensor:
        grad = torch.empty_like(x_RC)
        self._each_value("silu_backward", g_RC, x_RC, grad)
        return grad

    def _swiglu_backward(self, g_RC: Tensor, gate_RC: Tensor, up_RC: Tensor) -> tuple[Tensor, Tensor]:
        grads = torch.empty_like(gate_RC), torch.empty_like(up_RC)
        self._each_value("swiglu_backward", g_RC, gate_RC, up_RC, *grads)
        return grads

    def _attention_backward(
        self,
        g_BHTE: Tensor,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask_BHTS: Tensor | None,
        out_BHTE: Tensor,
        lse_BHT: Tensor,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, heads, length, width = q_BHTD.shape
        groups, many, values = v_BGSE.shape[1:]
        if not table.has_attention_backward(width, values, q_BHTD.element_size()):
            return super()._attention_backward(
                g_BHTE, q_BHTD, k_BGSD, v_BGSE, mask_BHTS, out_BHTE, lse_BHT, scale, causal
            )
        dtype, delta = q_BHTD.dtype, torch.empty_like(lse_BHT)
        grads = torch.empty_like(q_BHTD), torch.empty_like(k_BGSD), torch.empty_like(v_BGSE)
        one = table.attention_delta(values)
        count = batch * heads * length
        self.launch(one, dtype, (-(-count // one.blocks[0]),), g_BHTE, out_BHTE, delta, count, E=values)
        mask, strides, mask_kind = mask_arguments(mask_BHTS, q_BHTD)
        arrays = g_BHTE, q_BHTD, k_BGSD, v_BGSE, mask, lse_BHT, delta
        sizes: tuple[Any, ...] = (length, many, heads, heads // groups, scale, *strides)
        flags = {"D": width, "E": values, "CAUSAL": causal, "MASK": mask_kind, "IN_FLOAT32": self.interpreted}
        size, masked = q_BHTD.element_size(), mask_BHTS is not None
        to_q, to_kv = (
            table.attention(f"attention_backward_{which}", width, values, size, self.target, masked)
            for which in ("q", "kv")
        )
        self.launch(to_q, dtype, (batch * heads * -(-length // to_q.blocks[0]),), *arrays, grads[0], *sizes, **flags)
        self.launch(to_kv, dtype, (batch * groups * -(-many // to_kv.blocks[1]),), *arrays, *grads[1:], *sizes, **flags)
        return grads


def mask_arguments(mask_BHTS: Tensor | None, like: Tensor) -> tuple[Tensor, Strides, int]:
    """Return (tensor to read, its strides, 0 for broadcast dimensions, and its kind: MASK of triton_attention.py)."""
    if mask_BHTS is None:
        return like, (0, 0, 0, 1), 0
    strides = [0 if size == 1 else stride for size, stride in zip(mask_BHTS.shape, mask_BHTS.stride(), strict=True)]
    values = mask_BHTS.view(torch.uint8) if mask_BHTS.dtype == torch.bool else mask_BHTS
    return values, (strides[0], strides[1], strides[2], strides[3]), 1 if mask_BHTS.dtype == torch.bool else 2
