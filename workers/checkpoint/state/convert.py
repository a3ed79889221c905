"""Dtype conversions that count what they change. Nothing here decides whether that is acceptable."""

from functools import cache

import numpy as np
import torch

from workers.checkpoint.format.dtypes import COMPLEX, FLOATS, INTEGERS, dtype_name
from workers.checkpoint.report import Change
from workers.checkpoint.state import bits, fp8
from workers.errors import CheckpointError

# Significand bits with the hidden one, least and greatest exponent of a value (the least of a subnormal).
_FORMATS = {
    "float64": (53, -1074, 1023), "float32": (24, -149, 127), "bfloat16": (8, -133, 127), "float16": (11, -24, 15),
    "float8_e4m3fn": (4, -9, 8), "float8_e5m2": (3, -16, 15), "float8_e4m3fnuz": (4, -10, 7),
    "float8_e5m2fnuz": (3, -17, 15), "float8_e8m0fnu": (1, -127, 127),
    "bool": (1, 0, 0), "uint8": (8, 0, 7), "int8": (7, 0, 7), "int16": (15, 0, 15), "int32": (31, 0, 31),
    "int64": (63, 0, 63), "complex32": (11, -24, 15), "complex64": (24, -149, 127), "complex128": (53, -1074, 1023),
}  # fmt: skip
_SIGNED = {"int8", "int16", "int32", "int64"}


@cache
def may_lose(source: str, target: str) -> bool:
    """Whether any value of one dtype is another in the other: then each is compared, else none needs to be."""
    if source == target:
        return False
    if source not in _FORMATS or target not in _FORMATS or target == "bool":
        return True
    if source in COMPLEX and target not in COMPLEX:
        return True
    if target in INTEGERS and (source not in INTEGERS or (source in _SIGNED and target not in _SIGNED)):
        return True
    a, b = _FORMATS[source], _FORMATS[target]
    if target == "float8_e8m0fnu" or source == "float8_e8m0fnu":
        return a[1] < b[1] or target == "float8_e8m0fnu"
    if target.endswith("fnuz") and source != "bool":
        return True  # no infinity and no minus zero there
    return a[0] > b[0] or a[1] < b[1] or a[2] > b[2] or (target == "float8_e4m3fn" and source not in ("bool",))


def check_convertible(name: str, source: torch.dtype, target: torch.dtype) -> None:
    """Raises CheckpointError where there is no conversion."""
    for side in (source, target):
        if source != target and dtype_name(side) not in (*FLOATS, *COMPLEX, *INTEGERS):
            raise CheckpointError(
                f"{name}: no conversion from {dtype_name(source)} to {dtype_name(target)}",
                f"load it as {dtype_name(source)}",
            )


def put(target: torch.Tensor, source: torch.Tensor, count: bool = True) -> Change:
    """`source` (on the CPU) into `target`, of any dtype and device; answers what the conversion changed.

    Between the fp8 flavours of one format the bits are carried over: the value halves or doubles, and so does the scale
    in the other direction, which is the caller's to see to. With `count` false nothing is compared.
    """
    if target.dtype == source.dtype:
        bits.movable(target).copy_(bits.movable(source))
        return Change()
    if fp8.is_other_flavour(source.dtype, target.dtype):
        converted, change = fp8.carried_over(source, target.dtype)
        bits.movable(target).copy_(bits.movable(converted))
        return change
    plain = source.real if source.is_complex() and not target.is_complex() else source
    if target.device.type == "cpu":
        target.copy_(plain)
        return compare(source, target) if count else Change()
    converted = plain.to(target.dtype)
    target.copy_(converted)
    return compare(source, converted) if count else Change()


def compare(before: torch.Tensor, after: torch.Tensor) -> Change:
    """What became of the values; NaN equals NaN. Both on the CPU, of one shape, small enough for a few copies."""
    if not before.numel() or not may_lose(dtype_name(before.dtype), dtype_name(after.dtype)):
        return Change()
    if before.is_floating_point() and after.is_floating_point():
        return _compare_floats(before, after)
    wide = torch.complex128 if before.is_complex() or after.is_complex() else torch.float64
    b, a = before.to(wide), after.to(wide)
    return _masked(b, a, _differ(before, after, b, a))


def _compare_floats(before: torch.Tensor, after: torch.Tensor) -> Change:
    """Few passes over memory where all is finite, which is nearly always: the difference tells everything."""
    wide = torch.float64 if torch.float64 in (before.dtype, after.dtype) else torch.float32
    b, a = before.to(wide), after.to(wide)
    error = b - a
    low, high = _least_and_most(error)
    if low == high == 0:
        return Change()
    if low - low != 0 or high - high != 0:  # an infinity or NaN on one side or both
        return _masked(b, a, (a != b) & ~(torch.isnan(a) & torch.isnan(b)))
    changed = int(np.count_nonzero(error.numpy() != 0))
    least, most = _least_and_most(error.div_(b))
    if least != least:  # 0/0
        least, most = _least_and_most(error.nan_to_num_(0.0))
    return Change(changed, 0, 0, max(-low, high), max(-least, most))


def _least_and_most(values: torch.Tensor) -> tuple[float, float]:
    """numpy's reductions, and its comparisons above, are twice to six times as fast as torch's on the CPU."""
    return float(values.numpy().min()), float(values.numpy().max())


def _masked(b: torch.Tensor, a: torch.Tensor, changed: torch.Tensor) -> Change:
    """Errors are those of values finite on both sides, the relative one also of values other than zero."""
    finite = torch.isfinite(a) & torch.isfinite(b)
    error = (a - b).abs()
    relative = (error / b.abs())[finite & (b != 0)]
    return Change(
        int(changed.sum()),
        int((torch.isinf(a) & ~torch.isinf(b)).sum()),
        int((torch.isnan(a) & ~torch.isnan(b)).sum()),
        float(error[finite].max()) if finite.any() else 0.0,
        float(relative.max()) if relative.numel() else 0.0,
    )


def _differ(before: torch.Tensor, after: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    if dtype_name(before.dtype) in INTEGERS:
        # int64 beyond 2^53 does not fit float64: go back to it instead.
        returned = after.real if after.is_complex() else after
        returned = returned.double() if returned.is_floating_point() else returned
        return returned.to(torch.int64) != before.to(torch.int64)
    return (a != b) & ~(torch.isnan(a) & torch.isnan(b))
