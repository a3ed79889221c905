"""History of measured speed-ups of passes on this machine: lines of JSON in POLYFLEET_HOME."""

from pathlib import Path
from statistics import geometric_mean

from workers.measurement import measurement_files

NAME = "optimizations"
MAX_MEASUREMENTS = 20


def path() -> Path:
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
