"""What an optimiser returns beside the model: what it did, what it left and why, and what it measured."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from workers.optimization_levels import OptimizationLevel


@dataclass(frozen=True, slots=True)
class OptimizationResult:
    """`success` is false where the model could not be shown to be right: nothing was measured, see `warnings`.

    optimizations_skipped  name -> reason, with the numbers where a pass was tried and rolled back
    metrics                latency_before_s, latency_after_s, speedup: [median, low, high] with 95 % confidence;
                           max_abs_error, max_rel_error against the untouched model in float32; tolerance;
                           model_bytes_before, model_bytes_after; peak_bytes_before, peak_bytes_after (None where the
                           device tells no peak); compile_s; passes: name -> its own [median, low, high] speed-up
    """

    success: bool
    model: nn.Module
    level: OptimizationLevel
    optimizations_applied: list[str]
    optimizations_skipped: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: everything but the model."""
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
    """One pass as a user may know it. `measured_speedup` is from this machine's history: None where it has none."""

    name: str
    description: str
    applicable_levels: tuple[str, ...]
    requirements: tuple[str, ...]
    measured_speedup: float | None = None
