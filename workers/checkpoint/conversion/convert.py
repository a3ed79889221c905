"""Convert dtypes and count what changes. Whether a change is acceptable is decided elsewhere."""

from functools import cache

import numpy as np
import torch

from workers.checkpoint.conversion import bits, fp8, passes
from workers.checkpoint.conversion.load_report import ConversionLoss
from workers.checkpoint.format.dtypes import COMPLEX, FLOATS, INTEGERS, dtype_name
from workers.errors import CheckpointError

# Significand bits with the hidden one, minimum exponent (of a subnormal) and maximum exponent of a value.
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
    """Check whether any value changes between these dtypes: only then values must be compared."""
    if source == target:
        return False
    if source not in _FORMATS or target not in _FORMATS or target == "bool":
        return True
    if source in COMPLEX and target not in COMPLEX:
        return True
    if target in INTEGERS and (source not in INTEGERS or (source in _SIGNED and target not in _SIGNED)):
        return True
    source_format, target_format = _FORMATS[source], _FORMATS[target]
    if target == "float8_e8m0fnu" or source == "float8_e8m0fnu":
        return source_format[1] < target_format[1] or target == "float8_e8m0fnu"
    if target.endswith("fnuz") and source != "bool":
        return True  # fnuz has neither infinity nor negative zero
    return (
        source_format[0] > target_format[0]
        or source_format[1] < target_format[1]
        or source_format[2] > target_format[2]
        or (target == "float8_e4m3fn" and source not in ("bool",))
    )


def check_convertible(name: str, source: torch.dtype, target: torch.dtype) -> None:
    """Raise CheckpointError if there is no conversion."""
    for side in (source, target):
        if source != target and dtype_name(side) not in (*FLOATS, *COMPLEX, *INTEGERS):
            raise CheckpointError(
                f"{name}: no conversion from {dtype_name(source)} to {dtype_name(target)}",
                f"load it as {dtype_name(source)}",
            )


def put(target: torch.Tensor, source: torch.Tensor, count: bool = True) -> ConversionLoss:
    """Copy a CPU tensor into `target`, of any dtype and device; return what the conversion changed.

    Between the fp8 flavours of one format the bits are copied unchanged: the value halves or doubles, and the caller
    must adjust the scale in the other direction. With `count` false nothing is compared.
    """
    if target.dtype == source.dtype:
        bits.as_integers(target).copy_(bits.as_integers(source))
        return ConversionLoss()
    if fp8.is_other_flavour(source.dtype, target.dtype):
        converted, change = fp8.reinterpret_dtype(source, target.dtype)
        bits.as_integers(target).copy_(bits.as_integers(converted))
        return change
    plain = source.real if source.is_complex() and not target.is_complex() else source
    if target.device.type == "cpu":
        return _put_on_cpu(target, plain, source, count)
    converted = torch.empty_like(plain, dtype=target.dtype)
    change = _put_on_cpu(converted, plain, source, count)
    target.copy_(converted)
    return change


def _put_on_cpu(target: torch.Tensor, plain: torch.Tensor, source: torch.Tensor, count: bool) -> ConversionLoss:
    """Convert on the CPU by compiled code, if loaded, else by torch, with the same result."""
    names, compiled = (dtype_name(plain.dtype), dtype_name(target.dtype)), passes.loaded_passes()
    if compiled and {*names} <= {*passes.CODES} and plain.is_contiguous() and target.is_contiguous():
        must_count = count and may_lose(*names)
        return compiled.convert(plain.data_ptr(), target.data_ptr(), plain.numel(), names, must_count)
    target.copy_(plain)
    normalize_nan(target, plain)
    return compare(source, target) if count else ConversionLoss()


_NORMALIZED = {*passes.CODES} - {"float64", "float32"}


def normalize_nan(target: torch.Tensor, source: torch.Tensor) -> None:
    """Make NaN results as IEEE 754 recommends: same sign, first bits of the payload, quiet.

    Compiled code does so by itself. For 16-bit dtypes torch returns one NaN or another, depending on the position in a
    vector. It copies bfloat16 to float32 bit for bit, and converts between the larger two as processors do.
    """
    names = dtype_name(source.dtype), dtype_name(target.dtype)
    if not {*names} <= {*passes.CODES} or not {*names} & _NORMALIZED or names[0] == "bfloat16" != names[1] != "float16":
        return
    nan = torch.isnan(source)
    if not nan.any():
        return
    values = source[nan]
    values_as_integers = values.float().view(torch.int32) if values.dtype == torch.float64 else bits.as_integers(values)
    wide = values_as_integers.long()
    if values.dtype == torch.float16:
        wide = (wide & 0x8000) << 16 | 0x7FC00000 | (wide & 0x3FF) << 13
    elif values.dtype == torch.bfloat16:
        wide = wide << 16
    target[nan] = _nan_from_float32(wide & 0xFFFFFFFF, target.dtype)


def _nan_from_float32(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert the bits of a float32 NaN to a NaN of `dtype`."""
    if dtype == torch.bfloat16:
        return (wide >> 16 | 0x40).to(torch.int16).view(dtype)
    if dtype == torch.float16:
        return (wide >> 16 & 0x8000 | 0x7E00 | wide >> 13 & 0x3FF).to(torch.int16).view(dtype)
    return wide.to(torch.int32).view(torch.float32).to(dtype)


def compare(before: torch.Tensor, after: torch.Tensor) -> ConversionLoss:
    """Count changed values; NaN equals NaN. Both tensors are on the CPU, of one shape, and small: copies are made."""
    if not before.numel() or not may_lose(dtype_name(before.dtype), dtype_name(after.dtype)):
        return ConversionLoss()
    if before.is_floating_point() and after.is_floating_point():
        return _compare_floats(before, after)
    wide = torch.complex128 if before.is_complex() or after.is_complex() else torch.float64
    b, a = before.to(wide), after.to(wide)
    return _compare_masked(b, a, _changed_mask(before, after, b, a))


def _compare_floats(before: torch.Tensor, after: torch.Tensor) -> ConversionLoss:
    """Compare floats in few passes over memory: if all are finite, their difference is enough."""
    wide = torch.float64 if torch.float64 in (before.dtype, after.dtype) else torch.float32
    b, a = before.to(wide), after.to(wide)
    error = b - a
    low, high = _minimum_and_maximum(error)
    if low == high == 0:
        return ConversionLoss()
    if low - low != 0 or high - high != 0:  # infinity or NaN on either side
        return _compare_masked(b, a, (a != b) & ~(torch.isnan(a) & torch.isnan(b)))
    changed = int(np.count_nonzero(error.numpy() != 0))
    minimum, maximum = _minimum_and_maximum(error.div_(b))
    if minimum != minimum:  # 0/0
        minimum, maximum = _minimum_and_maximum(error.nan_to_num_(0.0))
    return ConversionLoss(changed, 0, 0, max(-low, high), max(-minimum, maximum))


def _minimum_and_maximum(values: torch.Tensor) -> tuple[float, float]:
    """Minimum and maximum. numpy is 2 to 6 times as fast as torch here on the CPU."""
    return float(values.numpy().min()), float(values.numpy().max())


def _compare_masked(b: torch.Tensor, a: torch.Tensor, changed: torch.Tensor) -> ConversionLoss:
    """Compare with masks. Errors are of values finite on both sides, relative errors also not of zeros."""
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


def _changed_mask(before: torch.Tensor, after: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    if dtype_name(before.dtype) in INTEGERS:
        # int64 beyond 2^53 does not fit float64: compare as int64 instead.
        returned = after.real if after.is_complex() else after
        returned = returned.double() if returned.is_floating_point() else returned
        return returned.to(torch.int64) != before.to(torch.int64)
    return (a != b) & ~(torch.isnan(a) & torch.isnan(b))
