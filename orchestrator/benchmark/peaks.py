"""Peak rates of devices, as documented by vendors and measured by others: the limits that results are compared with."""

from dataclasses import dataclass, field

from cluster import catalogue
from workers.devices.capability.documented import citation

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak rates per device, without sparsity: operations per second by precision, bytes per second of its memory.

    Unknown rates are missing or None. `achievable` are matrix products measured by others (MAMF). `source` lists the
    sources.
    """

    flops: dict[str, float] = field(default_factory=dict)
    bytes_per_s: float | None = None
    achievable: dict[str, float] = field(default_factory=dict)
    source: str = ""


def vendor_peak(kind: str) -> Peak:
    """Peak of a kind. float32 is the rate of the vector units (torch's default), not TF32."""
    row = catalogue.model(kind)
    if row is None:
        return Peak()
    per_device = 1 / row.devices_per_card
    tflops = {"fp32": row.fp32_tflops, "bf16": row.bf16_tflops, "fp16": row.fp16_tflops}
    return Peak(
        flops={name: value * TERA * per_device for name, value in tflops.items() if value},
        bytes_per_s=row.memory_bandwidth_gbs * GIGA * per_device if row.memory_bandwidth_gbs else None,
        achievable={"bf16": row.measured_bf16_tflops * TERA * per_device} if row.measured_bf16_tflops else {},
        source=citation(row.sources),
    )
