"""The words for dtypes that users write, and the torch dtypes they mean."""

import torch

from cluster.catalogue.precision import PRECISIONS, SHORT, long_name
from cluster.errors import UserError, nearest

INTEGERS = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
FLOAT8S = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
NAMES = INTEGERS + FLOATS + FLOAT8S


def dtype_of(word: "str | torch.dtype") -> torch.dtype:
    """`bf16`, `bfloat16` or torch.bfloat16 as the last. Raises UserError naming the nearest word."""
    if isinstance(word, torch.dtype):
        return word
    if not isinstance(word, str):
        raise UserError(f"{word!r} is no dtype", "write a word such as 'bfloat16', or torch.bfloat16")
    name = long_name(word)
    if name not in NAMES or not hasattr(torch, name):
        raise UserError(f"unknown dtype {word!r}", nearest(word.lower(), [*NAMES, *SHORT]))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def precision_of(word: "str | torch.dtype | None") -> torch.dtype:
    """The dtype to compute in: float32 (also for "" and None), bfloat16 or float16. Raises UserError."""
    if not word:
        return torch.float32
    name = name_of(dtype_of(word)) if not isinstance(word, str) else word.lower()
    if name not in PRECISIONS:
        raise UserError(f"{name!r} is no precision to compute in", nearest(name, PRECISIONS))
    return dtype_of(name)


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def every_dtype() -> tuple[torch.dtype, ...]:
    """Whole-byte dtypes that this torch has and a checkpoint may hold."""
    return tuple(getattr(torch, name) for name in NAMES if hasattr(torch, name))
