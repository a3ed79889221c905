"""Report of a load as plain data: everything that was converted, re-tied, derived or skipped is listed."""

from dataclasses import dataclass, field
from typing import Any

from cluster.serialization import to_plain
from workers.checkpoint.format.manifest import Producer


@dataclass(frozen=True, slots=True)
class ConversionLoss:
    """How a conversion changed values. Errors cover values finite before and after; relative errors exclude zeros."""

    values_changed: int = 0
    new_inf: int = 0
    new_nan: int = 0
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0

    def __add__(self, other: "ConversionLoss") -> "ConversionLoss":
        return ConversionLoss(
            self.values_changed + other.values_changed,
            self.new_inf + other.new_inf,
            self.new_nan + other.new_nan,
            max(self.max_abs_error, other.max_abs_error),
            max(self.max_rel_error, other.max_rel_error),
        )


@dataclass(frozen=True, slots=True)
class TensorReport:
    bytes: int
    stored_dtype: str
    dtype: str
    device: str
    change: ConversionLoss = ConversionLoss()


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A newer checkpoint that was skipped, and the reason."""

    path: str
    reason: str


@dataclass(slots=True)
class LoadReport:
    """`random` has `continued` or `derived: …` per stream. `retied` maps a tie to the tensor it now shares."""

    path: str
    step: int
    source: Producer
    skipped: list[SkippedCheckpoint] = field(default_factory=list)
    tensors: dict[str, TensorReport] = field(default_factory=dict)
    retied: dict[str, str] = field(default_factory=dict)
    random: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def converted(self) -> dict[str, TensorReport]:
        return {name: t for name, t in self.tensors.items() if t.stored_dtype != t.dtype}

    def lossy(self) -> dict[str, TensorReport]:
        return {name: t for name, t in self.tensors.items() if t.change.values_changed}

    def bytes(self) -> int:
        return sum(t.bytes for t in self.tensors.values())

    def as_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = to_plain(self)
        return data
