"""Estimate the relative speed of two kinds of one vendor from published figures, where nothing was measured."""

from cluster import catalogue
from cluster.catalogue import DeviceModel

FLOPS = {"fp32": "fp32_tflops", "bf16": "bf16_tflops", "fp16": "fp16_tflops"}

ERROR_FACTOR = 3.1
"""90 % of true ratios are within this factor of the estimate (benchmarks/estimates.py, NVIDIA's V100, P100, K80)."""


def ratio(kind: str, other: str, precision: str) -> float | None:
    """Return the speed of a device of `kind` relative to `other`, None for kinds of different vendors (untested).

    It is the geometric mean of the ratios of memory bandwidth and, if documented for both, arithmetic of that
    precision.
    """
    fast, slow = catalogue.model(kind), catalogue.model(other)
    if fast is None or slow is None or fast.backend != slow.backend:
        return None
    return figures_ratio(_figures(fast, precision), _figures(slow, precision))


def figures_ratio(fast: tuple[float, float], slow: tuple[float, float]) -> float | None:
    """Return the ratio of two devices, each as (bandwidth, arithmetic) with 0 for unknown; None without bandwidths."""
    if not (fast[0] and slow[0]):
        return None
    ratios = [fast[0] / slow[0]] + ([fast[1] / slow[1]] if fast[1] and slow[1] else [])
    return float((ratios[0] * ratios[-1]) ** 0.5)


def _figures(row: DeviceModel, precision: str) -> tuple[float, float]:
    flops = getattr(row, FLOPS[precision]) if precision in FLOPS else None
    return (row.memory_bandwidth_gbs or 0.0) / row.devices_per_card, (flops or 0.0) / row.devices_per_card
