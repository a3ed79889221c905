"""Which dtypes a device computes with: tried out on it, and kept, since the answers cost seconds on some devices."""

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from workers.backends.parts.precision import dtype_of, name_of
from workers.capability import probe_cache

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend

SIZE = 256
TURNS = 7  # both dtypes by turns: what else runs on this machine then slows both alike
# How many times as long as in float32 a product may take and still count as native. Measured on CPUs, in products of
# 256 and 512: bfloat16 1.9 with units (AVX512_BF16) and 3.7 to 5.3 without, 90 to 140 where no vector code is left;
# float16 1.0 with units and 63 to 130 without. A complex product is four real ones.
SLOWER = 3.0
COMPLEX_PRODUCTS = 4
HOPELESS = 20.0
"""A first turn this slow needs no second."""


def dtype_support_probe(backend: "BaseBackend", dtype: torch.dtype) -> str:
    """`native`, `emulated` or `absent`; see BaseBackend.dtype_support."""
    name, key = name_of(dtype), probe_cache.key(backend.kind)
    found = probe_cache.read(key).get("dtypes", {}).get(name)
    if found is None:
        found = _tried(backend, dtype)
        probe_cache.add(key, "dtypes", {name: found})
    return str(found)


def _tried(backend: "BaseBackend", dtype: torch.dtype) -> str:
    if not preserves_dtype(backend, dtype):
        return "absent"
    if not (dtype.is_floating_point or dtype.is_complex) or dtype == torch.float32:
        return "native"
    units = backend._has_units(dtype)
    if name_of(dtype).startswith("float8"):  # torch multiplies them in scaled_mm only: units or none, nothing between
        return "native" if units and backend.device.type == "cuda" else "emulated"
    if matmul_seconds(backend, dtype) is None:
        return "absent"
    return _timed(backend, dtype) if units is None else "native" if units else "emulated"


def preserves_dtype(backend: "BaseBackend", dtype: torch.dtype) -> bool:
    """Whether one element comes back from the device with its bits as they were."""
    value = torch.tensor([1 + 2j] if dtype.is_complex else [1.0]).to(dtype)
    try:
        back = value.to(backend.device).cpu()
    except (RuntimeError, TypeError):
        return False
    return torch.equal(back.view(torch.uint8), value.view(torch.uint8)) if dtype != torch.bool else bool(back.all())


def _timed(backend: "BaseBackend", dtype: torch.dtype) -> str:
    usual = {torch.float64: torch.float64, torch.complex128: torch.float64}.get(dtype, torch.float32)
    limit = SLOWER * (COMPLEX_PRODUCTS if dtype.is_complex else 1)
    matmul_seconds(backend, usual)
    mine: list[float] = []
    others: list[float] = []
    for _ in range(TURNS):
        mine.append(matmul_seconds(backend, dtype) or 0.0)
        others.append(matmul_seconds(backend, usual) or 0.0)
        if mine[0] > HOPELESS * limit * others[0]:
            break
    return "native" if not min(others) or min(mine) <= limit * min(others) else "emulated"


def matmul_seconds(backend: "BaseBackend", dtype: "str | torch.dtype") -> float | None:
    """Seconds of a square product; None where there is no such product, or it is wrong."""
    try:
        a = torch.ones(SIZE, SIZE).to(dtype_of(dtype)).to(backend.device)
        backend.synchronize()
        begun = perf_counter()
        product = a @ a
        backend.synchronize()
        taken_s = perf_counter() - begun
        return taken_s if float(product[0, 0].cpu().real) == SIZE else None
    except (RuntimeError, TypeError, NotImplementedError):
        return None
