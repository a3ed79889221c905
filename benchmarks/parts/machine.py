"""What the numbers were measured on."""

import argparse
import json
import os
import platform
import subprocess
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

NO_SETTINGS = ("output", "profile")


def describe(folder: Path) -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "file_system": _file_system(folder),
        "python": platform.python_version(),
        "polyfleet": version("polyfleet"),
        "ray": version("ray"),
    }


def circumstances(arguments: argparse.Namespace, before: list[float], folder: Path | None = None) -> dict[str, Any]:
    """Of a run that ends now: date, machine, load averages (`before`: of its beginning), and what it was asked for."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe(folder or Path(tempfile.gettempdir())),
        "load_average": {"before": before, "after": load()},
        "settings": {name: value for name, value in vars(arguments).items() if name not in NO_SETTINGS},
    }


def write(results: dict[str, Any], arguments: argparse.Namespace, before: list[float]) -> None:
    """Write results and circumstances to `arguments.output`, if it is set; of `arguments.folder` only the name."""
    if arguments.output:
        arguments.folder = Path(arguments.folder.name)
        text = json.dumps({**results, **circumstances(arguments, before)}, indent=1, default=str)
        arguments.output.write_text(f"{text}\n")


def load() -> list[float]:
    """Averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _cpu_name() -> str:
    if platform.system() != "Linux":
        return subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True
        ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def _file_system(folder: Path) -> str:
    """Of the disk that fsync was measured on."""
    mounts = [m for m in psutil.disk_partitions(all=True) if folder.is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else ""
