"""Summary of all backends: which are usable, or why not, their devices and memory, and the recommended one."""

import os
import sys
from typing import Any, TextIO

from cluster.catalogue import vendors
from cluster.errors import UserError
from workers.devices import backends
from workers.devices.backends import BackendUnavailable
from workers.devices.discovery.versions import versions
from workers.devices.selection import factory
from workers.options.config import ConfigLike


def backend_rows(config: ConfigLike = None) -> list[dict[str, Any]]:
    """Return one dict per backend, usable ones first. Opens no device.

    Keys: backend, title, aliases, available, reason, recommended, torch, and devices (device, name, kind, total_bytes,
    free_bytes, reason).
    """
    devices, best = factory.detected_devices(), _recommended(config)
    rows = [_row(name, [d for d in devices if d.backend == name], name == best) for name in backends.names()]
    order = {name: position for position, name in enumerate(vendors())}
    return sorted(rows, key=lambda row: (not row["available"], order.get(row["backend"], len(order))))


def print_backend_summary(config: ConfigLike = None, file: TextIO | None = None) -> None:
    """Print `backend_rows` as text, with ticks and crosses if the output's encoding has them, else yes and no."""
    out = sys.stdout if file is None else file
    if not hasattr(out, "write"):
        raise UserError(f"file is a {type(out).__name__}", "give an open text file, or omit it for stdout")
    has_unicode = (getattr(out, "encoding", None) or "").lower().startswith("utf")
    marks = ("✓", "✗") if has_unicode else ("yes", "no ")
    rows = backend_rows(config)
    print(f"Backends of this machine, torch {versions().get('torch', 'not installed')}", file=out)
    for row in rows:
        note = "recommended" if row["recommended"] else row["reason"]
        print(f" {marks[not row['available']]} {row['backend']:8} {note}".rstrip(), file=out)
        for device in row["devices"]:
            print(f"     {device['device']:8} {_sizes(device)}  {device['name']}{_reason_suffix(device)}", file=out)


def _row(name: str, devices: list[Any], recommended: bool) -> dict[str, Any]:
    vendor = vendors().get(name)
    return {
        "backend": name,
        "title": vendor.title if vendor else name,
        "aliases": list(vendor.aliases) if vendor else [],
        "available": not (reason := backends.unavailable_reason(name)),
        "reason": reason,
        "recommended": recommended,
        "torch": versions().get("torch", ""),
        "devices": [
            {
                "device": d.device_type,
                "name": d.device_name,
                "kind": d.kind,
                "total_bytes": d.total_memory_bytes,
                "free_bytes": d.free_memory_bytes,
                "reason": "emulated: computes on the CPU" if d.emulated else d.unavailable_reason,
            }
            for d in devices
        ],
    }


def _recommended(config: ConfigLike) -> str:
    try:
        return factory.detect_best_backend(config=config)
    except BackendUnavailable:
        return ""


def _sizes(device: dict[str, Any]) -> str:
    total, free = (None if device[k] is None else device[k] / 2**30 for k in ("total_bytes", "free_bytes"))
    return f"{'?' if free is None else f'{free:.1f}':>6} of {'?' if total is None else f'{total:.1f}':>6} GiB free"


def _reason_suffix(device: dict[str, Any]) -> str:
    return f" ({device['reason']})" if device["reason"] else ""


def disable_torch_autoload() -> None:
    """Stop torch from loading device extensions at import: torch_tpu would map its runtime into this process."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
