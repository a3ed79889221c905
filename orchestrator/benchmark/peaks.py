"""What vendors say a device reaches, and what others measured on it: the roofs that results are held against."""

from dataclasses import dataclass, field

from cluster import catalogue
from workers.capability.documented import cited

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Peak:
    """Per device, dense: operations per second by precision, and bytes per second of its memory; {} and None where
    nothing is written. `achievable` are products others measured (MAMF). `source` says where all of it stands."""

    flops: dict[str, float] = field(default_factory=dict)
    bytes_per_s: float | None = None
    achievable: dict[str, float] = field(default_factory=dict)
    source: str = ""


def vendor_peak(kind: str) -> Peak:
    """float32 is the vector units' (torch's default); TF32 is not counted as it."""
    facts = catalogue.model(kind)
    if facts is None:
        return Peak()
    per_device = 1 / facts.devices_per_card
    said = {"fp32": facts.fp32_tflops, "bf16": facts.bf16_tflops, "fp16": facts.fp16_tflops}
    return Peak(
        flops={name: value * TERA * per_device for name, value in said.items() if value},
        bytes_per_s=facts.memory_bandwidth_gbs * GIGA * per_device if facts.memory_bandwidth_gbs else None,
        achievable={"bf16": facts.measured_bf16_tflops * TERA * per_device} if facts.measured_bf16_tflops else {},
        source=cited(facts.sources),
    )
