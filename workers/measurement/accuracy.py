"""Measure the error of a result against the reference, and check it against the tolerance of its dtype.

The reference is computed on the CPU in float64 from the same weights and inputs, rounded to the precision first, so
only the error of the computation is measured. The check is symmetric: exchanging both sides does not change its result.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.devices.backends.precision import name_of

RTOL = {"float64": 1e-7, "float32": 1.3e-6, "bfloat16": 1.6e-2, "float16": 1e-3}
"""Relative tolerances of torch.testing.assert_close. Source: pytorch.org/docs/stable/testing.html."""
SAFETY = 8.0
"""Rounding errors of a sum of K terms grow as √K · eps · (size of the terms) if they are random (Higham, "Accuracy and
Stability of Numerical Algorithms", 2.6); eight times that covers the worst of millions of values, and two errors that
add up. Matrix units and CPUs accumulate sums in at least float32; values between layers are rounded to the dtype."""
GRADIENTS = 0.01
"""Minimum tolerance for gradients as a vector: 1 %. Where a ReLU's input is near zero, rounding flips its gradient, and
deep networks amplify that (ResNet-50 here: 0.02 % on the CPU, 0.4 % under XLA). The noise of a batch is far larger, and
so is the effect of a wrong backward."""
PROVENANCE = "rtol: torch.testing.assert_close; atol: 8 · (eps(float32) · √depth + eps · √roundings) · RMS"
SAMPLE = 1 << 22
"""Maximum number of elements compared. Of larger results every n-th is."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Expected rounding of a computation in `dtype`: `depth` is the longest chain of additions, `roundings` the number
    of successive results."""

    dtype: torch.dtype
    depth: float = 1.0
    roundings: float = 1.0

    @property
    def relative(self) -> float:
        """Expected error, relative to the size of the values."""
        single = torch.finfo(torch.float32).eps
        own = torch.finfo(self.dtype).eps
        return min(single, own) * math.sqrt(max(self.depth, 1.0)) + own * math.sqrt(max(self.roundings, 1.0))


def measure(actual: Tensor, expected: Tensor, rounding: Rounding, normwise: bool = False) -> dict[str, Any]:
    """Measure the errors of `actual` against `expected`.

    `ok`: every element is within atol + rtol · max(|actual|, |expected|). With `normwise`, the RMS error of the entire
    vector is within atol: used for gradients, some of which may be as small as noise. `scaled` is the largest error in
    units of the expected rounding error.
    """
    dtype = rounding.dtype
    if actual.shape != expected.shape:
        reason = f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
        return {"ok": False, "reason": reason, "dtype": name_of(dtype)}
    a, b = _sample(actual), _sample(expected)
    odd = int((_kind(a) != _kind(b)).sum())
    finite = torch.isfinite(a) & torch.isfinite(b)
    a, b = a[finite], b[finite]
    if not a.numel():
        result = _result(dtype, odd, {}, 0.0, 0.0, within=True)
        return (
            result
            if not actual.numel()
            else result | {"ok": False, "reason": "no value is finite, neither here nor in the reference"}
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
        "ok": not reason, "reason": reason, "dtype": name_of(dtype), "non_finite": odd, **errors,
        "rtol": rtol, "atol": atol, "provenance": PROVENANCE,
    }  # fmt: skip


def _sample(value: Tensor) -> Tensor:
    flat = value.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE))].cpu().double()


def _kind(values: Tensor) -> Tensor:
    """Classify values: 0 finite, 1 NaN, 2 +infinity, 3 -infinity."""
    return values.isnan().int() + 2 * values.isposinf().int() + 3 * values.isneginf().int()


def _ulp(error: Tensor, expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert errors to units in the last place (ULP) of `expected` in `dtype`."""
    tiny = torch.finfo(dtype).tiny
    exponent = torch.floor(torch.log2(expected.abs().clamp(min=tiny)))
    return error / (torch.finfo(dtype).eps * torch.exp2(exponent))


def _cosine(a: Tensor, b: Tensor) -> float:
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else float(bool((a == b).all()))


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
