"""Fast path for calls whose arrays already meet the hooks' requirements, as in most calls of a model.

The checks of the contract's public methods take 6 to 12 microseconds, as long as a norm of 64 short rows. All other
calls, including those with errors, use the public methods.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F  # noqa: N812

from workers.kernels import sdpa
from workers.kernels.base import KernelBackend
from workers.kernels.drivers.cpu_library import DTYPES

MIN_SMALL_ROWS, MAX_SMALL_ELEMENTS = 64, 1 << 14
"""Layer norm, softmax and SiLU of at least this many rows and at most this many elements are torch's: the call takes
most of the time there."""


class FastPath(KernelBackend):
    """Operations with a fast path. Their hooks may get arrays of any number of dimensions; the last is the row.

    Where torch was measured to be faster, it computes, if `leaves_to_torch`: products in float32, some attention, and
    small arrays. Calls that torch refuses get the errors of the public methods.
    """

    @property
    def leaves_to_torch(self) -> bool:
        raise NotImplementedError

    def multiplies_by_torch(self, dtype: torch.dtype, rows: int, b_transposed: bool) -> bool:
        """Return whether torch computes the product of an array with `rows` rows and a matrix."""
        raise NotImplementedError

    def attends_by_torch(self, dtype: torch.dtype, query_tokens: int, causal: bool) -> bool:
        raise NotImplementedError

    def matmul(self, a: Any, b: Any, *, out: Any = None) -> Any:
        fits = out is None and _is_cpu(a) and _is_cpu(b) and a.dim() == b.dim() == 2
        if fits and self.multiplies_by_torch(a.dtype, a.shape[0], not b.is_contiguous()):
            with suppress(RuntimeError):
                return torch.mm(a, b)
        return super().matmul(a, b, out=out)

    def matmul_vec(self, a: Any, x: Any, *, out: Any = None) -> Any:
        if out is None and self.leaves_to_torch and _is_cpu(a) and _is_cpu(x) and a.dtype is torch.float32:
            with suppress(RuntimeError):
                return torch.mv(a, x)
        return super().matmul_vec(a, x, out=out)

    def weighted_sum_rows(self, weights: Any, rows: Any, *, out: Any = None) -> Any:
        if out is None and self.leaves_to_torch and _is_cpu(weights) and _is_cpu(rows) and rows.dtype is torch.float32:
            with suppress(RuntimeError):
                return torch.mv(rows.t(), weights)
        return super().weighted_sum_rows(weights, rows, out=out)

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float | None = None,
        mask: Any = None,
        causal: bool = False,
        return_lse: bool = False,
        out: Any = None,
    ) -> Any:
        is_plain = mask is None and not return_lse and out is None and (scale is None or type(scale) is float)
        fits = is_plain and _are_heads(q, k, v) and (not causal or q.shape[2] == k.shape[2])
        if fits and self.attends_by_torch(q.dtype, q.shape[2], bool(causal)):
            return sdpa.attention(q, k, v, None, scale, bool(causal))
        return super().attention(q, k, v, scale=scale, mask=mask, causal=causal, return_lse=return_lse, out=out)

    def rmsnorm(
        self,
        x: Any,
        weight: Any = None,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        round_before_weight: bool = False,
        out: Any = None,
    ) -> Any:
        if out is None and not offset and _plain(x, eps) and _fits(weight, x):
            return self._compute_filled(self._rmsnorm, x, (x, weight), (eps, 0.0, round_before_weight))
        return super().rmsnorm(x, weight, eps, offset=offset, round_before_weight=round_before_weight, out=out)

    def layernorm(self, x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, out: Any = None) -> Any:
        if out is None and self._is_small(x) and _learns_nothing(weight) and _learns_nothing(bias) and _is_eps(eps):
            with suppress(RuntimeError):
                return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
        if out is None and _plain(x, eps) and _fits(weight, x) and _fits(bias, x):
            return self._compute_filled(self._layernorm, x, (x, weight, bias), (eps,))
        return super().layernorm(x, weight, bias, eps, out=out)

    def softmax(self, x: Any, *, out: Any = None) -> Any:
        if out is None and self._is_small(x):
            return torch.softmax(x, -1)
        return (
            self._compute_filled(self._softmax, x, (x,)) if out is None and _plain(x) else super().softmax(x, out=out)
        )

    def silu(self, x: Any, *, out: Any = None) -> Any:
        if out is None and self._is_small(x):
            return F.silu(x)
        return self._compute_filled(self._silu, x, (x,)) if out is None and _plain(x) else super().silu(x, out=out)

    def swiglu(self, gate: Any, up: Any, *, out: Any = None) -> Any:
        if out is None and _plain(gate) and _plain(up) and gate.shape == up.shape and gate.dtype is up.dtype:
            return self._compute_filled(self._swiglu, gate, (gate, up))
        return super().swiglu(gate, up, out=out)

    def _is_small(self, x: Any) -> bool:
        """Return whether torch computes an operation on these rows."""
        return (
            self.leaves_to_torch
            and _is_cpu(x)
            and x.dim() > 1
            and MIN_SMALL_ROWS * x.shape[-1] <= x.numel() <= MAX_SMALL_ELEMENTS
            and x.dtype in DTYPES
            and x.is_contiguous()
        )

    def _compute_filled(
        self, hook: Callable[..., object], like: Tensor, arrays: tuple[Any, ...], options: tuple[Any, ...] = ()
    ) -> Tensor:
        out = torch.empty_like(like)
        try:
            hook(*arrays, out, *options)
        except MemoryError as e:
            raise self._failure(e) from e
        return out


def _plain(x: Any, eps: Any = 0.0) -> bool:
    """Return whether a hook can use the non-empty tensor `x` directly, and `eps` is a valid number."""
    return (
        (type(x) is Tensor or type(x) is Parameter)
        and x.layout is torch.strided
        and x.is_cpu
        and x.dtype in DTYPES
        and x.is_contiguous()
        and x.numel() > 0
        and x.dim() > 0
        and not (x.requires_grad and torch.is_grad_enabled())
        and not x.is_neg()
        and _is_eps(eps)
    )


def _fits(vector: Any, x: Tensor) -> bool:
    return vector is None or (
        _plain(vector) and (vector.dtype is x.dtype or vector.dtype is torch.float32) and vector.shape == x.shape[-1:]
    )


def _is_cpu(x: Any) -> bool:
    """Return whether torch can compute with this array, without gradients."""
    return (
        (type(x) is Tensor or type(x) is Parameter)
        and x.is_cpu
        and x.layout is torch.strided
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def _learns_nothing(vector: Any) -> bool:
    return vector is None or _is_cpu(vector)


def _is_eps(eps: Any) -> bool:
    return type(eps) is float and 0.0 <= eps < 1e300


def _are_heads(q: Any, k: Any, v: Any) -> bool:
    """Return whether torch can compute attention of q [B, H, T, D], k and v [B, G, S, D]."""
    return (
        _is_cpu(q)
        and _is_cpu(k)
        and _is_cpu(v)
        and q.dim() == k.dim() == v.dim() == 4
        and min(*q.shape, *k.shape) > 0
        and q.dtype is k.dtype is v.dtype
        and k.shape == v.shape
        and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        and q.shape[1] % k.shape[1] == 0
    )
