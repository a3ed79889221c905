"""Whether a back end computes with a dtype natively, as functions. Users call them as methods: see user_methods.py."""

from typing import TYPE_CHECKING

import torch

from cluster.errors import UserError
from workers.devices.backends.precision import dtype_of, every_dtype, name_of
from workers.devices.backends.user_methods import overridable

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend


@overridable
def supports_dtype(backend: "BaseBackend", dtype: "str | torch.dtype") -> bool:
    """Return whether the device computes with a dtype natively: see BaseBackend.dtype_support."""
    return backend.dtype_support(dtype) == "native"


@overridable
def supported_dtypes(backend: "BaseBackend") -> frozenset[torch.dtype]:
    """Return the dtypes that the device computes with natively."""
    return frozenset(dtype for dtype in every_dtype() if supports_dtype(backend, dtype))


@overridable
def require_dtype(backend: "BaseBackend", dtype: "str | torch.dtype") -> None:
    """Raise UserError for a dtype that the device does not compute with natively; float32 always passes."""
    name = name_of(dtype_of(dtype))
    support = "native" if name == "float32" else backend.dtype_support(name)
    if support != "native":
        native = [n for n in ("bfloat16", "float16", "float32") if n == "float32" or supports_dtype(backend, n)]
        reason = "it is emulated by conversion, many times slower than float32" if support == "emulated" else ""
        message = f"{backend.device} has no native {name}" + (f": {reason}" if reason else "")
        raise UserError(message, f"use {' or '.join(native)}")
