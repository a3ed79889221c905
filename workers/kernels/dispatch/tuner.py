"""Store and read measurements of kernels: lines of JSON in POLYFLEET_HOME/measured/kernels.jsonl.

A measurement is valid for one kind of device, operation, dtype and class of shapes, eager or inside torch.compile, and
for the software that was measured. `polyfleet kernels tune` measures; a call of an operation never does, so that every
run uses the same kernels until the next tuning.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from workers.measurement import measurement_files

NAME = "kernels"
BASE = "torch"
"""Baseline of all measurements, also used where nothing was measured."""
REFERENCE = "numpy"
"""Reference for correctness. It is measured only if it is named, because it is never the fastest."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a measurement is valid for. `dtype` is torch's name without "torch."; `gradient`: the backward;
    `compiled`: inside torch.compile.
    """

    kind: str
    operation: str
    dtype: str
    shapes: str
    gradient: bool = False
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class KernelMeasurement:
    """One measurement. `speedup`: torch's time divided by that of `kernels`, with a 95 % interval; `right`: correct."""

    situation: Situation
    kernels: str
    software: str
    speedup: float
    low: float
    high: float
    right: bool = True

    def to_plain(self) -> dict[str, Any]:
        plain = asdict(self)
        return {**plain.pop("situation"), **plain}


def store_measurement(one: KernelMeasurement) -> bool:
    """Store a measurement. Return False if it could not be written."""
    return measurement_files.add(NAME, one.to_plain())


def read_measurements() -> list[KernelMeasurement]:
    """Read all measurements, oldest first. Other lines are skipped."""
    measurements = []
    for line in measurement_files.lines(NAME):
        try:
            situation = Situation(*(_check_type(line[n], t) for n, t in _SITUATION))
            rest = {n: _check_type(line[n], t) for n, t in _REST}
        except (KeyError, TypeError):
            continue
        measurements.append(KernelMeasurement(situation, **rest))
    return measurements


def fastest_choices(kind: str, software: dict[str, str]) -> dict[Situation, str]:
    """Return the fastest correct implementation in each situation, by the last measurement of each implementation.

    Only those in `software` (name -> hash of the installed software) are considered, and only if they are faster than
    torch beyond noise.
    """
    last = {(one.situation, one.kernels): one for one in read_measurements() if one.situation.kind == kind}
    best: dict[Situation, KernelMeasurement] = {}
    for (situation, name), one in last.items():
        counts = software.get(name) == one.software and one.right and one.low > 1
        if counts and (situation not in best or one.speedup > best[situation].speedup):
            best[situation] = one
    return {situation: one.kernels for situation, one in best.items()}


def software_of(kernels: Any) -> str:
    """Hash of the software of an implementation: torch, driver, compiler and our own source."""
    info = kernels.device_info()
    parts = [str(torch.__version__), *(str(info.get(key, "")) for key in ("driver", "version", "compiler"))]
    return hashlib.sha256("\0".join([*parts, _source(type(kernels).__module__)]).encode()).hexdigest()[:16]


@cache
def _source(module: str) -> str:
    """Hash the source: this entire package for our implementations, which share parts, else the module's file."""
    folder = Path(__file__).parents[1]
    if module.startswith("workers.kernels."):
        files: Iterable[Path] = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix not in {".pyc", ".md"})
    else:
        import sys

        files = [Path(str(sys.modules[module].__file__))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


_SITUATION: tuple[tuple[str, type], ...] = (
    *((name, str) for name in ("kind", "operation", "dtype", "shapes")),
    *((name, bool) for name in ("gradient", "compiled")),
)
_REST: tuple[tuple[str, type], ...] = (
    *((name, str) for name in ("kernels", "software")),
    *((name, float) for name in ("speedup", "low", "high")),
    ("right", bool),
)


def _check_type(value: Any, expected_type: type) -> Any:
    """Return a value of the expected type; an int is also accepted as a float. Raises TypeError for another type."""
    if isinstance(value, bool) != (expected_type is bool) or not isinstance(
        value, (int, float) if expected_type is float else expected_type
    ):
        raise TypeError(value)
    return float(value) if isinstance(value, int) and expected_type is float else value
