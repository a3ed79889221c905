"""Result of an optimisation: passes applied, passes skipped with reasons, and measurements.

Measured speed-ups of passes are also stored for later runs on this machine, as lines of JSON in POLYFLEET_HOME.
"""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from torch import nn

from workers.measurement import measurement_files
from workers.options.optimization_levels import OptimizationLevel


@dataclass(frozen=True, slots=True)
class OptimizationResult:
    """Outcome of `optimize`. `success` is false if the model could not be checked; `warnings` contains the reason.

    optimizations_skipped  name -> reason, with the numbers where a pass was tried and rolled back
    metrics                latency_before_s, latency_after_s, speedup: [median, low, high] with 95 % confidence;
                           max_abs_error, max_rel_error against the untouched model in float32; tolerance;
                           model_bytes_before, model_bytes_after; peak_bytes_before, peak_bytes_after (None where the
                           device reports no peak); compile_s; passes: name -> its own [median, low, high] speed-up
    """

    success: bool
    model: nn.Module
    level: OptimizationLevel
    optimizations_applied: list[str]
    optimizations_skipped: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the model as plain data."""
        return {
            "success": self.success,
            "level": self.level.value,
            "optimizations_applied": self.optimizations_applied,
            "optimizations_skipped": self.optimizations_skipped,
            "warnings": self.warnings,
            "metrics": self.metrics,
        }


@dataclass(frozen=True, slots=True)
class OptimizationStrategy:
    """Description of one pass. `measured_speedup` comes from this machine's history (None: never measured)."""

    name: str
    description: str
    applicable_levels: tuple[str, ...]
    requirements: tuple[str, ...]
    measured_speedup: float | None = None


NAME = "optimizations"
MAX_MEASUREMENTS = 20


def history_path() -> Path:
    return measurement_files.path(NAME)


def record_speedup(kind: str, torch: str, name: str, speedup: float) -> None:
    measurement_files.add(NAME, {"kind": kind, "torch": torch, "pass": name, "speedup": round(speedup, 4)})


def speedups(kind: str) -> dict[str, float]:
    """Return the geometric mean of the last 20 measurements of each pass on this kind of device."""
    by_pass: dict[str, list[float]] = {}
    for line in measurement_files.lines(NAME):
        if line.get("kind") == kind and isinstance(line.get("speedup"), int | float) and line["speedup"] > 0:
            by_pass.setdefault(str(line.get("pass")), []).append(float(line["speedup"]))
    return {name: round(geometric_mean(values[-MAX_MEASUREMENTS:]), 3) for name, values in by_pass.items()}
