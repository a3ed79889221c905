"""What devices answered when they were probed, kept in POLYFLEET_HOME by kind of device and set of libraries.

A file holds JSON: {"dtypes": {name: native, emulated or absent}, "flash_attention": …, "compile": …}, as far as it was
asked. Imports no torch, so that whoever only looks at a machine can read what was found out on it.
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
from workers.discovery import cpu
from workers.discovery.machine import Machine
from workers.discovery.versions import versions

# Variables that hide units of a CPU from torch or oneDNN: the answers under them are others.
HEEDED = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "XLA_FLAGS")
OTHERS = ("ray", "polyfleet", "safetensors")


def key(kind: str) -> str:
    """The file's stem: other libraries, another CPU behind the same kind, and other limits are other answers."""
    limits = {name: os.environ[name] for name in HEEDED if name in os.environ}
    told = json.dumps([kind, _cpu(), _libraries(), limits], sort_keys=True)
    return f"{kind.replace(':', '-')}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def read(stem: str) -> dict[str, Any]:
    """{} where nothing was asked yet, or the file cannot be read."""
    try:
        found = json.loads(_path(stem).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("dtypes", {}), dict) else {}


def add(stem: str, name: str, value: Any) -> None:
    """One answer more; `dtypes` grow. Whole or not at all: a full disk costs a second probing, not the answer."""
    found = read(stem)
    found[name] = {**found.get(name, {}), **value} if isinstance(value, dict) else value
    path = _path(stem)
    part = path.with_suffix(f".{os.getpid()}")
    try:
        private_dir(path.parent)
        part.write_text(json.dumps(found))
        part.replace(path)
    except (OSError, UserError):
        part.unlink(missing_ok=True)


def dtypes(kind: str) -> dict[str, str]:
    """name -> native, emulated or absent, where all floating dtypes were tried out on this kind here; {} where not."""
    found: dict[str, str] = read(key(kind)).get("dtypes", {})
    return found if set(FLOATS) <= set(found) else {}


@cache
def _cpu() -> str:
    """A kind `cpu` does not tell which."""
    return cpu.name(Machine())


@cache
def _libraries() -> dict[str, str]:
    return {name: number for name, number in versions().items() if name not in OTHERS}


def _path(stem: str) -> Path:
    return home() / "capabilities" / f"{stem}.json"
