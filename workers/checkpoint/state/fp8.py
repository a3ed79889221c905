"""The two flavours of fp8: OCP's (`fn`, NVIDIA and most others) and that of MI300 (`fnuz`).

The same bits mean half the value in fnuz, so bits are carried over and the tensor's scale is doubled; the other way it
is halved. Only a few bit patterns have no counterpart. Source: torch's own decoding of all 256 patterns, both ways.
"""

from functools import cache

import torch

from workers.checkpoint.format.dtypes import dtype_name
from workers.checkpoint.load_report import ConversionLoss

FLAVOURS = {
    "float8_e4m3fn": "float8_e4m3fnuz",
    "float8_e4m3fnuz": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2fnuz",
    "float8_e5m2fnuz": "float8_e5m2",
}


def is_other_flavour(source: torch.dtype, target: torch.dtype) -> bool:
    return FLAVOURS.get(dtype_name(source)) == dtype_name(target)


def scale_factor(source: str, target: str) -> float:
    """By what the scale of a tensor is to be multiplied when its bits are carried over; 1 where they are not."""
    if FLAVOURS.get(source) != target:
        return 1.0
    return 2.0 if target.endswith("fnuz") else 0.5


def reinterpreted_dtype(source: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ConversionLoss]:
    """`source` in the other flavour, and which values (times their scale) that changed."""
    table, worth, became = _table(dtype_name(source.dtype), dtype_name(dtype))
    patterns = source.reshape(-1).view(torch.uint8).long()
    converted = table[patterns].view(dtype).reshape(source.shape)
    hits = torch.bincount(patterns, minlength=256)
    changed = hits.bool() & (worth != became) & ~(worth.isnan() & became.isnan())
    finite = changed & worth.isfinite() & became.isfinite()
    error = (became - worth).abs()[finite]
    return converted, ConversionLoss(
        int(hits[changed].sum()),
        int(hits[changed & became.isinf()].sum()),
        int(hits[changed & became.isnan()].sum()),
        float(error.max()) if error.numel() else 0.0,
        float((error / worth.abs()[finite]).max()) if error.numel() else 0.0,
    )


@cache
def _table(source: str, target: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each of 256 patterns: the pattern in the other flavour, its value before, and its value after (both scaled
    alike). A value beyond the other's range becomes its greatest."""
    patterns = torch.arange(256, dtype=torch.uint8)
    worth = patterns.view(getattr(torch, source)).double()
    factor = scale_factor(source, target)
    wanted = worth / factor
    nan = torch.tensor([float("nan")]).to(getattr(torch, target)).view(torch.uint8)
    limit = torch.finfo(getattr(torch, target)).max
    nearest = wanted.clamp(-limit, limit).float().to(getattr(torch, target)).view(torch.uint8)
    table = torch.where(worth.isfinite(), nearest, nan)
    return table, worth, table.view(getattr(torch, target)).double() * factor
