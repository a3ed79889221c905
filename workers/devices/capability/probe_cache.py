"""Cache of probe results in POLYFLEET_HOME: one file per kind of device and set of libraries.

A file contains JSON: {"dtypes": {name: native, emulated or absent}, "flash_attention": …, "compile": …}; values not yet
probed are missing. Imports no torch, so that discovery can read the cache without torch.
"""

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from cluster.catalogue.precision import FLOATS
from cluster.errors import UserError
from cluster.paths import home, private_dir
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.vendors import cpu
from workers.devices.discovery.versions import versions

# Variables that hide units of a CPU from torch or oneDNN, and so change the results.
LIMITING_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "XLA_FLAGS")
IGNORED_LIBRARIES = ("ray", "polyfleet", "safetensors")


def key(kind: str) -> str:
    """Return the file's stem. It depends on the kind, the CPU's model, the libraries and LIMITING_VARIABLES."""
    limits = {name: os.environ[name] for name in LIMITING_VARIABLES if name in os.environ}
    identity = json.dumps([kind, _cpu(), _libraries(), limits], sort_keys=True)
    return f"{kind.replace(':', '-')}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def read(stem: str) -> dict[str, Any]:
    """Return the cached results; {} if there are none or the file is unreadable."""
    try:
        results = json.loads(_path(stem).read_text())
    except (OSError, ValueError):
        return {}
    return results if isinstance(results, dict) and isinstance(results.get("dtypes", {}), dict) else {}


def add(stem: str, name: str, value: Any) -> None:
    """Add one result to the file; a dict is merged into the existing one.

    The file is replaced atomically. An error, such as a full disk, is ignored: the next process probes again.
    """
    results = read(stem)
    results[name] = {**results.get(name, {}), **value} if isinstance(value, dict) else value
    path = _path(stem)
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        private_dir(path.parent)
        temporary.write_text(json.dumps(results))
        temporary.replace(path)
    except (OSError, UserError):
        temporary.unlink(missing_ok=True)


def dtypes(kind: str) -> dict[str, str]:
    """Return dtype -> native, emulated or absent, if all floating dtypes of this kind were probed here; else {}."""
    probed: dict[str, str] = read(key(kind)).get("dtypes", {})
    return probed if set(FLOATS) <= set(probed) else {}


@cache
def _cpu() -> str:
    """Model name of the CPU, which the kind `cpu` does not contain."""
    return cpu.name(Machine())


@cache
def _libraries() -> dict[str, str]:
    return {name: number for name, number in versions().items() if name not in IGNORED_LIBRARIES}


def _path(stem: str) -> Path:
    return home() / "capabilities" / f"{stem}.json"
