"""What passes have been measured to bring on this machine: lines of JSON in POLYFLEET_HOME, newest last."""

import json
import os
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from cluster.errors import UserError
from cluster.paths import home, private_dir

MOST_BYTES = 1 << 20
LAST = 20


def path() -> Path:
    return home() / "measured" / "optimizations.jsonl"


def remember(kind: str, torch: str, name: str, speedup: float) -> None:
    """One line, in one write: several processes may remember at once. A full disk costs the line, not the result."""
    line = json.dumps({"kind": kind, "torch": torch, "pass": name, "speedup": round(speedup, 4)}) + "\n"
    try:
        private_dir(path().parent)
        with path().open("a") as file:
            file.write(line)
        if path().stat().st_size > MOST_BYTES:
            _forget_older_half()
    except (OSError, UserError):
        return


def speedups(kind: str) -> dict[str, float]:
    """The geometric mean of the last measurements of each pass on this kind of device."""
    found: dict[str, list[float]] = {}
    for line in _lines():
        if line.get("kind") == kind and isinstance(line.get("speedup"), int | float) and line["speedup"] > 0:
            found.setdefault(str(line.get("pass")), []).append(float(line["speedup"]))
    return {name: round(geometric_mean(values[-LAST:]), 3) for name, values in found.items()}


def _lines() -> list[dict[str, Any]]:
    """A line that was cut short by a crash is passed over."""
    found = []
    try:
        text = path().read_text(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _forget_older_half() -> None:
    kept = path().read_text(errors="replace").splitlines(keepends=True)
    part = path().with_suffix(f".{os.getpid()}")
    part.write_text("".join(kept[len(kept) // 2 :]))
    part.replace(path())
