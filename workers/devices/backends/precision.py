"""Dtype names that users write, and the torch dtypes they stand for."""

import torch

from cluster.catalogue.precision import PRECISIONS, SHORT, long_name
from cluster.errors import UserError, nearest

INTEGERS = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
FLOAT8S = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
NAMES = INTEGERS + FLOATS + FLOAT8S


def dtype_of(value: "str | torch.dtype") -> torch.dtype:
    """Convert `bf16`, `bfloat16` or torch.bfloat16 to the torch dtype. Raises UserError naming the nearest name."""
    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise UserError(f"{value!r} is not a dtype", "write a name such as 'bfloat16', or torch.bfloat16")
    name = long_name(value)
    if name not in NAMES or not hasattr(torch, name):
        raise UserError(f"unknown dtype {value!r}", nearest(value.lower(), [*NAMES, *SHORT]))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def precision_of(value: "str | torch.dtype | None") -> torch.dtype:
    """The dtype to compute in: float32 (also for "" and None), bfloat16 or float16. Raises UserError for others."""
    if not value:
        return torch.float32
    name = name_of(dtype_of(value)) if not isinstance(value, str) else value.lower()
    if name not in PRECISIONS:
        raise UserError(f"{name!r} is not a precision to compute in", nearest(name, PRECISIONS))
    return dtype_of(name)


def name_of(dtype: torch.dtype) -> str:
    """Name without the module: `bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def every_dtype() -> tuple[torch.dtype, ...]:
    """Dtypes of this torch that a checkpoint may contain; each element is at least one byte."""
    return tuple(getattr(torch, name) for name in NAMES if hasattr(torch, name))
