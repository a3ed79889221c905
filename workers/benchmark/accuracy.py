"""How far a result is from the reference, and whether that is what its dtype allows.

The reference is computed on the CPU in float64 from the same weights and inputs, rounded to the precision first: what
is measured is the error of the computation. Both sides count alike: exchanging them changes no verdict.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.backends.parts.precision import name_of

RTOL = {"float64": 1e-7, "float32": 1.3e-6, "bfloat16": 1.6e-2, "float16": 1e-3}
"""torch.testing.assert_close's own. Source: pytorch.org/docs/stable/testing.html."""
SAFETY = 8.0
"""Rounding errors of a sum of K terms grow as √K · eps · (size of the terms) if they are random (Higham, "Accuracy and
Stability of Numerical Algorithms", 2.6); eight times that holds for the worst of millions of values, and for two
errors that meet. Sums are kept in float32 at least, by matrix units as by CPUs; what lies between layers is rounded."""
GRADIENTS = 0.01
"""Gradients as a vector may be off by 1 %, where rounding does not explain more: where a ReLU's input is near zero a
rounding flips its gradient, and deep networks amplify that (ResNet-50 here: 0.02 % on the CPU, 0.4 % under XLA). The
noise of a batch is far larger, an error in a backward as well."""
PROVENANCE = "rtol: torch.testing.assert_close; atol: 8 · (eps(float32) · √depth + eps · √roundings) · RMS"
SAMPLE = 1 << 22
"""Elements looked at in all; of larger results every n-th."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a computation in `dtype` may lose: `depth` is the longest chain of additions, `roundings` how many results
    follow upon each other."""

    dtype: torch.dtype
    depth: float = 1.0
    roundings: float = 1.0

    @property
    def relative(self) -> float:
        """The error to be expected, relative to the size of the values."""
        single = torch.finfo(torch.float32).eps
        own = torch.finfo(self.dtype).eps
        return min(single, own) * math.sqrt(max(self.depth, 1.0)) + own * math.sqrt(max(self.roundings, 1.0))


def measure(have: Tensor, want: Tensor, rounding: Rounding, normwise: bool = False) -> dict[str, Any]:
    """Errors of `have` against `want`. `ok` says whether every element is within atol + rtol · max(|have|, |want|);
    with `normwise` whether the error as a vector is, as gradients are judged: single ones may be as small as noise.

    `scaled` is the largest error in units of what rounding explains.
    """
    dtype = rounding.dtype
    if have.shape != want.shape:
        reason = f"shapes differ: {tuple(have.shape)} and {tuple(want.shape)}"
        return {"ok": False, "reason": reason, "dtype": name_of(dtype)}
    a, b = _thinned(have), _thinned(want)
    odd = int((_kind(a) != _kind(b)).sum())
    finite = torch.isfinite(a) & torch.isfinite(b)
    a, b = a[finite], b[finite]
    if not a.numel():
        told = _result(dtype, odd, {}, 0.0, 0.0, within=True)
        return (
            told if not have.numel() else told | {"ok": False, "reason": "no value is finite, here as in the reference"}
        )
    rms = max(float(side.square().mean().sqrt()) for side in (a, b))
    unit = rounding.relative * rms
    rtol, atol = RTOL[name_of(dtype)], max(SAFETY * unit, GRADIENTS * rms if normwise else 0.0)
    error = (a - b).abs()
    rms_error = float(error.square().mean().sqrt())
    limit = atol + rtol * torch.maximum(a.abs(), b.abs())
    within = rms_error <= atol if normwise else bool((error <= limit).all())
    return _result(dtype, odd, {
        "max_abs": float(error.max()),
        "max_rel": _largest(error[b != 0] / b[b != 0].abs()),
        "rms_rel": rms_error / rms if rms else 0.0,
        "ulp_p99": float(torch.quantile(_ulp(error, b, dtype)[:SAMPLE], 0.99)),
        "cosine": _cosine(a, b),
        "scaled": float(error.max()) / unit if unit else 0.0,
    }, rtol, atol, within)  # fmt: skip


def _result(
    dtype: torch.dtype, odd: int, errors: dict[str, float], rtol: float, atol: float, within: bool
) -> dict[str, Any]:
    reason = f"{odd} values are NaN or infinite on one side only" if odd else ""
    reason = reason or ("" if within else "errors beyond the tolerance of its dtype")
    return {
        "ok": not reason, "reason": reason, "dtype": name_of(dtype), "odd": odd, **errors,
        "rtol": rtol, "atol": atol, "provenance": PROVENANCE,
    }  # fmt: skip


def _thinned(value: Tensor) -> Tensor:
    flat = value.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE))].cpu().double()


def _kind(values: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 +infinity, 3 -infinity."""
    return values.isnan().int() + 2 * values.isposinf().int() + 3 * values.isneginf().int()


def _ulp(error: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    """Errors in units of the last place that `want` has in `dtype`."""
    tiny = torch.finfo(dtype).tiny
    exponent = torch.floor(torch.log2(want.abs().clamp(min=tiny)))
    return error / (torch.finfo(dtype).eps * torch.exp2(exponent))


def _cosine(a: Tensor, b: Tensor) -> float:
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else float(bool((a == b).all()))


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
