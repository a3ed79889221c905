"""How much faster one kind of a vendor is than another by their published figures: a guess where nobody measured."""

from cluster import catalogue
from cluster.catalogue import DeviceModel

FLOPS = {"fp32": "fp32_tflops", "bf16": "bf16_tflops", "fp16": "fp16_tflops"}

WITHIN = 3.1
"""Nine of ten true ratios lie within this factor of the guess (benchmarks/estimates.py, NVIDIA's V100, P100, K80)."""


def ratio(kind: str, other: str, precision: str) -> float | None:
    """Of a device of `kind` to one of `other`: by memory bandwidth and, where both are known, arithmetic of that
    precision, of which the geometric mean is taken. None for other vendors' kinds: nobody has tried it on these.
    """
    fast, slow = catalogue.model(kind), catalogue.model(other)
    if fast is None or slow is None or fast.backend != slow.backend:
        return None
    return of_figures(_figures(fast, precision), _figures(slow, precision))


def of_figures(fast: tuple[float, float], slow: tuple[float, float]) -> float | None:
    """(bandwidth, arithmetic) of one device each, 0 where it is not known."""
    if not (fast[0] and slow[0]):
        return None
    told = [fast[0] / slow[0]] + ([fast[1] / slow[1]] if fast[1] and slow[1] else [])
    return float((told[0] * told[-1]) ** 0.5)


def _figures(row: DeviceModel, precision: str) -> tuple[float, float]:
    flops = getattr(row, FLOPS[precision]) if precision in FLOPS else None
    return (row.memory_bandwidth_gbs or 0.0) / row.devices_per_card, (flops or 0.0) / row.devices_per_card
