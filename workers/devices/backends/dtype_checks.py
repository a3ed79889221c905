"""Whether a back end computes with a dtype natively, as functions. Users call them as methods: see user_methods.py.

What the catalogue does not say is probed once and cached: on some devices a probe takes seconds.
"""

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from cluster.errors import UserError
from workers.devices.backends.device_facts import kind
from workers.devices.backends.precision import dtype_of, every_dtype, name_of
from workers.devices.backends.user_methods import overridable
from workers.devices.capability import probe_cache

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend

SIZE = 256
TURNS = 7  # the two dtypes alternate, so that other load on the machine slows both equally
# A dtype is native if a matrix product takes at most this many times as long as in float32. Ratios measured on CPUs,
# sizes 256 and 512: bfloat16 1.9 with hardware units (AVX512_BF16), 3.7 to 5.3 without, 90 to 140 without vector code;
# float16 1.0 with units, 63 to 130 without. A complex product is four real ones.
MAX_SLOWDOWN = 3.0
COMPLEX_PRODUCTS = 4
EARLY_STOP_FACTOR = 20.0
"""The probe stops after one turn if the dtype is this many times slower than the limit."""


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


def probe_dtype_support(backend: "BaseBackend", dtype: torch.dtype) -> str:
    """Return `native`, `emulated` or `absent`, from the cache or by a probe; see BaseBackend.dtype_support."""
    name, key = name_of(dtype), probe_cache.key(kind(backend))
    support = probe_cache.read(key).get("dtypes", {}).get(name)
    if support is None:
        support = _probe_dtype(backend, dtype)
        probe_cache.add(key, "dtypes", {name: support})
    return str(support)


def _probe_dtype(backend: "BaseBackend", dtype: torch.dtype) -> str:
    if not preserves_dtype(backend, dtype):
        return "absent"
    if not (dtype.is_floating_point or dtype.is_complex) or dtype == torch.float32:
        return "native"
    units = backend._has_units(dtype)
    if name_of(dtype).startswith("float8"):  # torch multiplies float8 only in scaled_mm, which needs hardware units
        return "native" if units and backend.device.type == "cuda" else "emulated"
    if matmul_seconds(backend, dtype) is None:
        return "absent"
    return _probe_speed(backend, dtype) if units is None else "native" if units else "emulated"


def preserves_dtype(backend: "BaseBackend", dtype: torch.dtype) -> bool:
    """Return whether an element keeps its bits when it is copied to the device and back."""
    value = torch.tensor([1 + 2j] if dtype.is_complex else [1.0]).to(dtype)
    try:
        back = value.to(backend.device).cpu()
    except (RuntimeError, TypeError):
        return False
    return torch.equal(back.view(torch.uint8), value.view(torch.uint8)) if dtype != torch.bool else bool(back.all())


def _probe_speed(backend: "BaseBackend", dtype: torch.dtype) -> str:
    reference = {torch.float64: torch.float64, torch.complex128: torch.float64}.get(dtype, torch.float32)
    limit = MAX_SLOWDOWN * (COMPLEX_PRODUCTS if dtype.is_complex else 1)
    matmul_seconds(backend, reference)
    tested_s: list[float] = []
    reference_s: list[float] = []
    for _ in range(TURNS):
        tested_s.append(matmul_seconds(backend, dtype) or 0.0)
        reference_s.append(matmul_seconds(backend, reference) or 0.0)
        if tested_s[0] > EARLY_STOP_FACTOR * limit * reference_s[0]:
            break
    return "native" if not min(reference_s) or min(tested_s) <= limit * min(reference_s) else "emulated"


def matmul_seconds(backend: "BaseBackend", dtype: "str | torch.dtype") -> float | None:
    """Time one square matrix product, in seconds; None if the device cannot compute it or the result is wrong."""
    try:
        a = torch.ones(SIZE, SIZE).to(dtype_of(dtype)).to(backend.device)
        backend.synchronize()
        start_s = perf_counter()
        product = a @ a
        backend.synchronize()
        elapsed_s = perf_counter() - start_s
        return elapsed_s if float(product[0, 0].cpu().real) == SIZE else None
    except (RuntimeError, TypeError, NotImplementedError):
        return None
