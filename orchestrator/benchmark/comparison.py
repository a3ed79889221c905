"""What results are compared with: the reference of each, round by round, and the peak rates of its device. Pure.

A result here is a line of a run, with its samples: {"case", "target" (the target), "host", "precision", "level",
"regime", "id", "blocks": [{"round", "calls", "parts_s", …}], "control_blocks"}.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cluster import catalogue
from workers.devices.capability.documented import citation
from workers.measurement import statistics
from workers.measurement.statistics import Ratio

Data = dict[str, Any]
TERA, GIGA = 1e12, 1e9


def find_reference(result: Data, measured: Iterable[Data]) -> Data | None:
    """Find the result to compare with, None for a reference itself.

    It is the same case on the first target that has it, with the same settings, else that target's first settings. On
    that target, it is the first settings. With several kernels, it is the first kernels on the same target.
    """
    of_case = [c for c in measured if c["case"] == result["case"]]
    kernel_variants = [
        c for c in of_case if c["target"] == result["target"] and _settings(c)[:3] == _settings(result)[:3]
    ]
    if kernel_variants and kernel_variants[0]["id"] != result["id"]:
        return kernel_variants[0]
    of_first_target = [c for c in of_case if c["target"] == of_case[0]["target"]]
    equal_settings = [
        c for c in of_first_target if _settings(c) == _settings(result) and c["target"] != result["target"]
    ]
    reference = (equal_settings or of_first_target)[0]
    return None if reference["id"] == result["id"] else reference


def _settings(result: Data) -> tuple[str, str, str, str]:
    return result["precision"], result["level"], result["regime"], result.get("kernels", "")


def compare_results(reference: Data, result: Data) -> Ratio:
    """Compare a result with its reference: paired by round on one host, unpaired on two hosts or with few rounds."""
    a, b = statistics.by_round(reference["blocks"]), statistics.by_round(result["blocks"])
    common = sorted(a.keys() & b.keys())
    if reference["host"] == result["host"] and len(common) >= statistics.MIN_COMMON_ROUNDS:
        return statistics.paired([a[n] for n in common], [b[n] for n in common])
    return statistics.unpaired(list(a.values()), list(b.values()))


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
