"""Convert between the flavours of fp8: OCP's (`fn`, NVIDIA and most others) and MI300's (`fnuz`).

The same bits mean half the value in fnuz, so the bits are copied unchanged and the tensor's scale is doubled, or halved
in the other direction. Only a few bit patterns have no counterpart. Source: torch's own decoding of all 256 patterns,
in both directions.
"""

from functools import cache

import torch

from workers.checkpoint.conversion.load_report import ConversionLoss
from workers.checkpoint.format.dtypes import dtype_name

FLAVOURS = {
    "float8_e4m3fn": "float8_e4m3fnuz",
    "float8_e4m3fnuz": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2fnuz",
    "float8_e5m2fnuz": "float8_e5m2",
}


def is_other_flavour(source: torch.dtype, target: torch.dtype) -> bool:
    return FLAVOURS.get(dtype_name(source)) == dtype_name(target)


def scale_factor(source: str, target: str) -> float:
    """Factor for a tensor's scale if its bits are copied unchanged; 1 unless the dtypes are flavours of one format."""
    if FLAVOURS.get(source) != target:
        return 1.0
    return 2.0 if target.endswith("fnuz") else 0.5


def reinterpret_dtype(source: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ConversionLoss]:
    """Return `source` in the other flavour, and how that changed its values (times their scale)."""
    table, before, after = _table(dtype_name(source.dtype), dtype_name(dtype))
    patterns = source.reshape(-1).view(torch.uint8).long()
    converted = table[patterns].view(dtype).reshape(source.shape)
    hits = torch.bincount(patterns, minlength=256)
    changed = hits.bool() & (before != after) & ~(before.isnan() & after.isnan())
    finite = changed & before.isfinite() & after.isfinite()
    error = (after - before).abs()[finite]
    return converted, ConversionLoss(
        int(hits[changed].sum()),
        int(hits[changed & after.isinf()].sum()),
        int(hits[changed & after.isnan()].sum()),
        float(error.max()) if error.numel() else 0.0,
        float((error / before.abs()[finite]).max()) if error.numel() else 0.0,
    )


@cache
def _table(source: str, target: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each of 256 patterns: pattern in the other flavour, value before and after, scaled alike.
    A value beyond the other flavour's range becomes its maximum.
    """
    patterns = torch.arange(256, dtype=torch.uint8)
    values = patterns.view(getattr(torch, source)).double()
    factor = scale_factor(source, target)
    scaled = values / factor
    nan = torch.tensor([float("nan")]).to(getattr(torch, target)).view(torch.uint8)
    limit = torch.finfo(getattr(torch, target)).max
    nearest = scaled.clamp(-limit, limit).float().to(getattr(torch, target)).view(torch.uint8)
    table = torch.where(values.isfinite(), nearest, nan)
    return table, values, table.view(getattr(torch, target)).double() * factor
