"""Fast path for calls whose arrays already meet the hooks' requirements, as in most calls of a model.

The checks of the contract's public methods take 6 to 12 microseconds, as long as a norm of 64 short rows. All other
calls, including those with errors, use the public methods.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from workers.kernels.base import KernelBackend
from workers.kernels.drivers.cpu_library import DTYPES


class FastPath(KernelBackend):
    """Operations with a fast path. Their hooks may get arrays of any number of dimensions; the last is the row."""

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
        if out is None and _plain(x, eps) and _fits(weight, x) and _fits(bias, x):
            return self._compute_filled(self._layernorm, x, (x, weight, bias), (eps,))
        return super().layernorm(x, weight, bias, eps, out=out)

    def softmax(self, x: Any, *, out: Any = None) -> Any:
        return (
            self._compute_filled(self._softmax, x, (x,)) if out is None and _plain(x) else super().softmax(x, out=out)
        )

    def silu(self, x: Any, *, out: Any = None) -> Any:
        return self._compute_filled(self._silu, x, (x,)) if out is None and _plain(x) else super().silu(x, out=out)

    def swiglu(self, gate: Any, up: Any, *, out: Any = None) -> Any:
        if out is None and _plain(gate) and _plain(up) and gate.shape == up.shape and gate.dtype is up.dtype:
            return self._compute_filled(self._swiglu, gate, (gate, up))
        return super().swiglu(gate, up, out=out)

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
        and type(eps) is float
        and 0.0 <= eps < 1e300
    )


def _fits(vector: Any, x: Tensor) -> bool:
    return vector is None or (
        _plain(vector) and (vector.dtype is x.dtype or vector.dtype is torch.float32) and vector.shape == x.shape[-1:]
    )
