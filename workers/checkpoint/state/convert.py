"""Dtype conversions that count what they change. Nothing here decides whether that is acceptable."""

from functools import cache

import numpy as np
import torch

from workers.checkpoint.disk import passes
from workers.checkpoint.format.dtypes import COMPLEX, FLOATS, INTEGERS, dtype_name
from workers.checkpoint.load_report import ConversionLoss
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


def put(target: torch.Tensor, source: torch.Tensor, count: bool = True) -> ConversionLoss:
    """`source` (on the CPU) into `target`, of any dtype and device; answers what the conversion changed.

    Between the fp8 flavours of one format the bits are carried over: the value halves or doubles, and so does the scale
    in the other direction, which is the caller's to see to. With `count` false nothing is compared.
    """
    if target.dtype == source.dtype:
        bits.movable(target).copy_(bits.movable(source))
        return ConversionLoss()
    if fp8.is_other_flavour(source.dtype, target.dtype):
        converted, change = fp8.reinterpreted_dtype(source, target.dtype)
        bits.movable(target).copy_(bits.movable(converted))
        return change
    plain = source.real if source.is_complex() and not target.is_complex() else source
    if target.device.type == "cpu":
        return _put_here(target, plain, source, count)
    converted = torch.empty_like(plain, dtype=target.dtype)
    change = _put_here(converted, plain, source, count)
    target.copy_(converted)
    return change


def _put_here(target: torch.Tensor, plain: torch.Tensor, source: torch.Tensor, count: bool) -> ConversionLoss:
    """By compiled code where this process has loaded it, else by torch, with the same answer."""
    names, compiled = (dtype_name(plain.dtype), dtype_name(target.dtype)), passes.loaded()
    if compiled and {*names} <= {*passes.CODES} and plain.is_contiguous() and target.is_contiguous():
        counted = count and may_lose(*names)
        return compiled.convert(plain.data_ptr(), target.data_ptr(), plain.numel(), names, counted)
    target.copy_(plain)
    settle_nan(target, plain)
    return compare(source, target) if count else ConversionLoss()


_SETTLED = {*passes.CODES} - {"float64", "float32"}


def settle_nan(target: torch.Tensor, source: torch.Tensor) -> None:
    """NaN with its sign, the first bits of its payload, and quiet, as IEEE 754 recommends and compiled code does it.

    Of 16 bits torch makes one NaN or another, by where in a vector a value lies. It copies bfloat16 to float32 bit for
    bit, and converts between the larger two as processors do.
    """
    names = dtype_name(source.dtype), dtype_name(target.dtype)
    if not {*names} <= {*passes.CODES} or not {*names} & _SETTLED or names[0] == "bfloat16" != names[1] != "float16":
        return
    nan = torch.isnan(source)
    if not nan.any():
        return
    values = source[nan]
    bits_of = values.float().view(torch.int32) if values.dtype == torch.float64 else bits.movable(values)
    wide = bits_of.long()
    if values.dtype == torch.float16:
        wide = (wide & 0x8000) << 16 | 0x7FC00000 | (wide & 0x3FF) << 13
    elif values.dtype == torch.bfloat16:
        wide = wide << 16
    target[nan] = _as(wide & 0xFFFFFFFF, target.dtype)


def _as(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of NaN in float32 as NaN of `dtype`."""
    if dtype == torch.bfloat16:
        return (wide >> 16 | 0x40).to(torch.int16).view(dtype)
    if dtype == torch.float16:
        return (wide >> 16 & 0x8000 | 0x7E00 | wide >> 13 & 0x3FF).to(torch.int16).view(dtype)
    return wide.to(torch.int32).view(torch.float32).to(dtype)


def compare(before: torch.Tensor, after: torch.Tensor) -> ConversionLoss:
    """What became of the values; NaN equals NaN. Both on the CPU, of one shape, small enough for a few copies."""
    if not before.numel() or not may_lose(dtype_name(before.dtype), dtype_name(after.dtype)):
        return ConversionLoss()
    if before.is_floating_point() and after.is_floating_point():
        return _compare_floats(before, after)
    wide = torch.complex128 if before.is_complex() or after.is_complex() else torch.float64
    b, a = before.to(wide), after.to(wide)
    return _masked(b, a, _differ(before, after, b, a))


def _compare_floats(before: torch.Tensor, after: torch.Tensor) -> ConversionLoss:
    """Few passes over memory where all is finite, which is nearly always: the difference tells everything."""
    wide = torch.float64 if torch.float64 in (before.dtype, after.dtype) else torch.float32
    b, a = before.to(wide), after.to(wide)
    error = b - a
    low, high = _least_and_most(error)
    if low == high == 0:
        return ConversionLoss()
    if low - low != 0 or high - high != 0:  # an infinity or NaN on one side or both
        return _masked(b, a, (a != b) & ~(torch.isnan(a) & torch.isnan(b)))
    changed = int(np.count_nonzero(error.numpy() != 0))
    least, most = _least_and_most(error.div_(b))
    if least != least:  # 0/0
        least, most = _least_and_most(error.nan_to_num_(0.0))
    return ConversionLoss(changed, 0, 0, max(-low, high), max(-least, most))


def _least_and_most(values: torch.Tensor) -> tuple[float, float]:
    """numpy's reductions, and its comparisons above, are twice to six times as fast as torch's on the CPU."""
    return float(values.numpy().min()), float(values.numpy().max())


def _masked(b: torch.Tensor, a: torch.Tensor, changed: torch.Tensor) -> ConversionLoss:
    """Errors are those of values finite on both sides, the relative one also of values other than zero."""
    finite = torch.isfinite(a) & torch.isfinite(b)
    error = (a - b).abs()
    relative = (error / b.abs())[finite & (b != 0)]
    return ConversionLoss(
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
