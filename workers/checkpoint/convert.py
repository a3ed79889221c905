"""Dtype conversions that count what they change. Nothing here decides whether that is acceptable."""

import torch

from workers.checkpoint.dtypes import COMPLEX, FLOATS, INTEGERS, dtype_name
from workers.checkpoint.report import Change
from workers.errors import CheckpointError

_AT_A_TIME = 1 << 22
"""Values compared at once: bounds the float64 copies to some hundred MB."""


def convert(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Change]:
    """`tensor` (on the CPU) as `dtype`, and what that did. Raises CheckpointError where there is no conversion."""
    if tensor.dtype == dtype:
        return tensor, Change()
    for side in (tensor.dtype, dtype):
        if dtype_name(side) not in (*FLOATS, *COMPLEX, *INTEGERS):
            raise CheckpointError(
                f"{name}: no conversion from {dtype_name(tensor.dtype)} to {dtype_name(dtype)}",
                f"load it as {dtype_name(tensor.dtype)}",
            )
    source = tensor.real if tensor.is_complex() and not dtype.is_complex else tensor
    converted = source.to(dtype)
    changes = [_compare(before, after) for before, after in zip(_slices(tensor), _slices(converted), strict=True)]
    return converted, Change(
        sum(c.values_changed for c in changes),
        sum(c.new_inf for c in changes),
        sum(c.new_nan for c in changes),
        max((c.max_abs_error for c in changes), default=0.0),
    )


def _slices(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.reshape(-1), _AT_A_TIME) if tensor.numel() else ()


def _compare(before: torch.Tensor, after: torch.Tensor) -> Change:
    """Both as the widest type that holds them exactly. NaN equals NaN."""
    changed = _differ(before, after)
    wide = torch.complex128 if before.is_complex() or after.is_complex() else torch.float64
    b, a = before.to(wide), after.to(wide)
    finite = torch.isfinite(a) & torch.isfinite(b)
    error = (a - b).abs()[finite]
    return Change(
        int(changed.sum()),
        int((torch.isinf(a) & ~torch.isinf(b)).sum()),
        int((torch.isnan(a) & ~torch.isnan(b)).sum()),
        float(error.max()) if error.numel() else 0.0,
    )


def _differ(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    if dtype_name(before.dtype) in INTEGERS:
        # int64 beyond 2^53 does not fit float64: go back to it instead.
        returned = after.real if after.is_complex() else after
        returned = returned.double() if returned.is_floating_point() else returned
        return returned.to(torch.int64) != before.to(torch.int64)
    wide = torch.complex128 if before.is_complex() or after.is_complex() else torch.float64
    b, a = before.to(wide), after.to(wide)
    return (a != b) & ~(torch.isnan(a) & torch.isnan(b))
