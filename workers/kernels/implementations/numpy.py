"""Reference kernels: every operation in float64 by its definition. Slow; all others are checked against them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.kernels.base import KernelBackend

Array = np.ndarray[Any, np.dtype[np.float64]]
QUIET = np.errstate(all="ignore")
"""Infinities and NaN are valid results here, not errors."""


class Kernels(KernelBackend):
    """Kernels for tensors in the CPU's memory; also in float64, where results are not rounded."""

    name = "numpy"
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

    @classmethod
    def unavailable_reason(cls) -> str:
        return ""

    def device_info(self) -> dict[str, Any]:
        return {"device": "cpu", "device_name": "float64 reference", "driver": "numpy", "version": np.__version__}

    @QUIET
    def _matmul(self, a_BMK: Tensor, b_BKN: Tensor, out_BMN: Tensor, a_transposed: bool, b_transposed: bool) -> None:
        a, b = _to_float64(a_BMK), _to_float64(b_BKN)
        _fill(out_BMN, (a.swapaxes(1, 2) if a_transposed else a) @ (b.swapaxes(1, 2) if b_transposed else b))

    @QUIET
    def _matmul_vec(self, a_BMK: Tensor, x_BK: Tensor, out_BM: Tensor) -> None:
        _fill(out_BM, (_to_float64(a_BMK) @ _to_float64(x_BK)[..., None])[..., 0])

    @QUIET
    def _weighted_sum_rows(self, weights_BT: Tensor, rows_BTD: Tensor, out_BD: Tensor) -> None:
        _fill(out_BD, (_to_float64(weights_BT)[:, None] @ _to_float64(rows_BTD))[:, 0])

    @QUIET
    def _rmsnorm(
        self,
        x_RC: Tensor,
        weight_C: Tensor | None,
        out_RC: Tensor,
        eps: float,
        offset: float,
        round_before_weight: bool,
    ) -> None:
        x = _to_float64(x_RC)
        normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        if round_before_weight:
            normed = _to_float64(torch.from_numpy(normed).to(x_RC.dtype))
        _fill(out_RC, normed if weight_C is None else normed * (offset + _to_float64(weight_C)))

    @QUIET
    def _layernorm(
        self, x_RC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, out_RC: Tensor, eps: float
    ) -> None:
        x = _to_float64(x_RC)
        normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        normed = normed if weight_C is None else normed * _to_float64(weight_C)
        _fill(out_RC, normed if bias_C is None else normed + _to_float64(bias_C))

    @QUIET
    def _softmax(self, x_RC: Tensor, out_RC: Tensor) -> None:
        x = _to_float64(x_RC)
        shares = np.exp(x - x.max(-1, keepdims=True))
        _fill(out_RC, shares / shares.sum(-1, keepdims=True))

    @QUIET
    def _silu(self, x_RC: Tensor, out_RC: Tensor) -> None:
        _fill(out_RC, _silu(_to_float64(x_RC)))

    @QUIET
    def _swiglu(self, gate_RC: Tensor, up_RC: Tensor, out_RC: Tensor) -> None:
        _fill(out_RC, _silu(_to_float64(gate_RC)) * _to_float64(up_RC))

    @QUIET
    def _rope(self, x_BTD: Tensor, cos_SP: Tensor, sin_SP: Tensor, out_BTD: Tensor, position: int, pairs: bool) -> None:
        x = _to_float64(x_BTD)
        length, count = x.shape[1], cos_SP.shape[1]
        rows = slice(position, position + length)
        cos, sin = _to_float64(cos_SP)[rows], _to_float64(sin_SP)[rows]
        first, second = _pairs(count, pairs)
        rotated = x.copy()
        rotated[..., first] = x[..., first] * cos - x[..., second] * sin
        rotated[..., second] = x[..., second] * cos + x[..., first] * sin
        _fill(out_BTD, rotated)

    @QUIET
    def _scores(self, q_BHTD: Tensor, k_BGSD: Tensor, out_BHTS: Tensor, scale: float) -> None:
        _fill(out_BHTS, _scores(q_BHTD, k_BGSD) * scale)

    @QUIET
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
        scores = _masked(_scores(q_BHTD, k_BGSD) * scale, mask_BHTS, causal)
        values = np.repeat(_to_float64(v_BGSE), q_BHTD.shape[1] // v_BGSE.shape[1], 1)
        largest = scores.max(-1, keepdims=True, initial=-np.inf)
        shares = np.exp(scores - np.where(np.isneginf(largest), 0.0, largest))
        total = shares.sum(-1, keepdims=True)
        _fill(out_BHTE, np.where(total == 0, 0.0, shares / total) @ values)
        if lse_BHT is not None:
            _fill(lse_BHT, (np.log(total) + np.where(np.isneginf(largest), 0.0, largest))[..., 0])


def _to_float64(tensor: Tensor) -> Array:
    return tensor.double().numpy()


def _fill(out: Tensor, values: Array) -> None:
    out.copy_(torch.from_numpy(np.ascontiguousarray(values)))


def _silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def _pairs(count: int, adjacent: bool) -> tuple[slice, slice]:
    """Return slices of the first and the second values of the pairs that rotate together."""
    if adjacent:
        return slice(0, 2 * count, 2), slice(1, 2 * count, 2)
    return slice(0, count), slice(count, 2 * count)


def _scores(q_BHTD: Tensor, k_BGSD: Tensor) -> Array:
    keys = np.repeat(_to_float64(k_BGSD), q_BHTD.shape[1] // k_BGSD.shape[1], 1)
    return _to_float64(q_BHTD) @ keys.swapaxes(-1, -2)


def _masked(scores: Array, mask: Tensor | None, causal: bool) -> Array:
    if mask is not None:
        scores = np.where(mask.numpy(), scores, -np.inf) if mask.dtype == torch.bool else scores + _to_float64(mask)
    if causal:
        query_tokens, key_tokens = scores.shape[-2:]
        scores = np.where(
            np.tril(np.ones((query_tokens, key_tokens), dtype=bool), key_tokens - query_tokens), scores, -np.inf
        )
    return scores
