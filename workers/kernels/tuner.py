"""Which implementation was measured to be the fastest right one: lines of JSON in
POLYFLEET_HOME/measured/kernels.jsonl.

A measurement counts for the kind of device, operation, dtype and class of shapes it was taken for, eager or inside
torch.compile, and for the software it was taken with. `polyfleet kernels tune` takes them; nothing is measured when an
operation is called, so that every run takes the same kernels until the next tuning.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from workers import measurement_files

NAME = "kernels"
BASE = "torch"
"""What all are measured against, and what is taken where nothing was measured."""
REFERENCE = "numpy"
"""What all are checked against. It is measured only where it is named: it is never the fastest."""


@dataclass(frozen=True, slots=True)
class Situation:
    """`dtype` as torch names it without "torch."; `gradient`: the backward is meant; `compiled`: inside
    torch.compile.
    """

    kind: str
    operation: str
    dtype: str
    shapes: str
    gradient: bool = False
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """`speedup` is torch's time over that of `kernels`, with its interval of 95 %; `right`: its results were."""

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


def remember(one: Measured) -> bool:
    """False where it could not be written."""
    return measurement_files.add(NAME, one.to_plain())


def recorded() -> list[Measured]:
    """Oldest first. What is no measurement is passed over."""
    found = []
    for line in measurement_files.lines(NAME):
        try:
            situation = Situation(*(_typed(line[n], t) for n, t in _SITUATION))
            rest = {n: _typed(line[n], t) for n, t in _REST}
        except (KeyError, TypeError):
            continue
        found.append(Measured(situation, **rest))
    return found


def choices(kind: str, software: dict[str, str]) -> dict[Situation, str]:
    """The fastest right implementation in each situation: of those in `software` (name -> what it is made of here), the
    last measurement each; one that is not faster than torch beyond noise is not chosen.
    """
    last = {(one.situation, one.kernels): one for one in recorded() if one.situation.kind == kind}
    found: dict[Situation, Measured] = {}
    for (situation, name), one in last.items():
        counts = software.get(name) == one.software and one.right and one.low > 1
        if counts and (situation not in found or one.speedup > found[situation].speedup):
            found[situation] = one
    return {situation: one.kernels for situation, one in found.items()}


def software_of(kernels: Any) -> str:
    """One word for what an implementation is made of: torch, its driver and compiler, and our own source."""
    info = kernels.device_info()
    told = [str(torch.__version__), *(str(info.get(key, "")) for key in ("driver", "version", "compiler"))]
    return hashlib.sha256("\0".join([*told, _source(type(kernels).__module__)]).encode()).hexdigest()[:16]


@cache
def _source(module: str) -> str:
    """Of our own implementations the whole package: they share parts. Of another distribution's the module's file."""
    folder = Path(__file__).parent
    if module.startswith("workers.kernels."):
        files: Iterable[Path] = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc")
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


def _typed(value: Any, wanted: type) -> Any:
    """Raises TypeError for a value of another type; a whole number is a number too."""
    if isinstance(value, bool) != (wanted is bool) or not isinstance(
        value, (int, float) if wanted is float else wanted
    ):
        raise TypeError(value)
    return float(value) if isinstance(value, int) and wanted is float else value
