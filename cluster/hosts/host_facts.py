"""Print facts of the machine it runs on: `ssh HOST python3.11 -I - < host_facts.py`.

The machine may have none of our code yet. The sender writes a line before this code, `REQUEST = {...}`, with the keys
"address", "port", "identity", "code" and "interpreters". The output is one line of JSON. Standard library only.
"""

import json
import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
import time
from pathlib import Path

REQUEST = globals().get("REQUEST", {})


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk on which that folder is, or would be."""
    existing = next(p for p in (path, *path.parents) if p.exists())
    return shutil.disk_usage(existing).free


def can_bind(address: str, port: int = 0) -> bool:
    """Return whether this machine has that IP address, and the port, unless it is 0, is free."""
    if not address:
        return True
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections that have just been closed
            s.bind((address, port))
    except OSError:
        return False
    return True


def text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def is_writable(path: Path) -> bool:
    existing = next(p for p in (path, *path.parents) if p.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


MODULES = {
    "nvidia": ("nvidia", "nvgpu"),
    "amd": ("amdgpu",),
    "intel": ("xe", "i915", "habanalabs"),
    "neuron": ("neuron",),
}


def drivers() -> dict[str, str]:
    """Return the version of each vendor's kernel driver, "loaded" if it names none. WSL has only a device file."""
    versions = {}
    for vendor, names in MODULES.items():
        loaded = [folder for name in names if (folder := Path("/sys/module") / name).exists()]
        if loaded or (vendor == "nvidia" and Path("/dev/dxg").exists()):
            versions[vendor] = next(filter(None, (text(folder / "version") for folder in loaded)), "loaded")
    if list(Path("/dev").glob("accel*")) or Path("/dev/vfio").is_dir():
        versions["tpu"] = "loaded"
    return versions


def main() -> dict[str, object]:
    user_home = Path.home()
    base = Path(os.environ.get("XDG_CACHE_HOME") or user_home / ".cache")
    cache = Path(os.environ.get("POLYFLEET_CACHE") or base / "polyfleet")
    hostname = socket.gethostname()
    # Hosts may have one home, on a network file system: each needs a folder of its own.
    home = user_home / ".polyfleet" / "hosts" / REQUEST["identity"] / (re.sub(r"[^A-Za-z0-9_-]", "-", hostname) or "-")
    environments = sorted(p.parent.name for p in (cache / "environments").glob("*/.complete")) if cache.is_dir() else []
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "release": platform.release(),
        "hostname": hostname,
        "boot": text(Path("/proc/sys/kernel/random/boot_id")),
        "python": sys.executable,
        "implementation": platform.python_implementation(),
        "python_version": platform.python_version(),
        "platform": sysconfig.get_platform(),
        "has_venv": has_venv(),
        "user": os.geteuid(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "time_s": time.time(),
        "home": str(home),
        "cache": str(cache),
        "home_free_bytes": free_bytes(home),
        "cache_free_bytes": free_bytes(cache),
        "home_writable": is_writable(home),
        "environments": environments,
        "has_code": (cache / "code" / REQUEST["code"]).is_dir(),
        "has_address": can_bind(REQUEST["address"]),
        "has_port": can_bind(REQUEST["address"], REQUEST["port"]),
        "record": text(home / "fleet.json"),
        "drivers": drivers(),
        "absent": [path for path in REQUEST["interpreters"] if not os.access(path, os.X_OK)],
    }


def has_venv() -> bool:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(main()))  # noqa: T201
