"""Before a checkpoint moves: what the target keeps, converts and refuses, and what cannot follow."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from cluster.accelerators import TABLE, backend_name
from workers.checkpoint.checks import read_manifest, tensor_bytes
from workers.checkpoint.manifest import RANDOM, Manifest
from workers.checkpoint.targets import NOTES, Fate, fate, lacking

HOST_STREAMS = ("python", "numpy", "cpu")


def plan(path: str | Path, backend: str, emulated: bool = False) -> dict[str, Any]:
    """What loading with dtype="native" would do on a backend's device. `emulated`: XLA on the CPU in place of a TPU.

    {"step", "source", "target", "bytes", "ok", "dtypes": [{"dtype", "tensors", "bytes", "action", "to", "may_lose",
    "reason", "example"}], "random": {stream: "continued" | "derived: …"}}; `ok` is False where a dtype is refused.
    """
    manifest = read_manifest(Path(path))
    name = backend_name(backend)
    dtypes = _dtypes(manifest, name, emulated)
    return {
        "step": manifest.step,
        "source": {"backend": manifest.producer.backend, "kind": manifest.producer.kind},
        "target": {"backend": name, "emulated": emulated},
        "bytes": manifest.size_bytes(),
        "ok": all(line["action"] != "refuse" for line in dtypes),
        "dtypes": dtypes,
        "random": _random(manifest, TABLE[name].torch_device),
    }


def _dtypes(manifest: Manifest, backend: str, emulated: bool) -> list[dict[str, Any]]:
    """Random states and numpy arrays stay on the host whatever the target, so they are not counted."""
    states = f"{RANDOM}/ranks/"
    names: dict[str, list[str]] = defaultdict(list)
    for name, tensor in manifest.tensors.items():
        if not tensor.alias_of and tensor.role not in ("rng", "array") and not name.startswith(states):
            names[tensor.dtype].append(name)
    lacks = lacking(backend, emulated)
    return [_line(manifest, dtype, held, fate(dtype, lacks), backend) for dtype, held in sorted(names.items())]


def _line(manifest: Manifest, dtype: str, names: list[str], fate: Fate, backend: str) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "tensors": len(names),
        "bytes": sum(tensor_bytes(manifest.tensors[name]) for name in names),
        "action": fate.action,
        "to": fate.to,
        "may_lose": fate.may_lose,
        "reason": fate.reason or NOTES.get(backend, {}).get(dtype, ""),
        "example": names[0],
    }


def _random(manifest: Manifest, device_type: str) -> dict[str, str]:
    return _of_ranks(manifest, device_type) or _of_streams(manifest, device_type)


def _of_ranks(manifest: Manifest, device_type: str) -> dict[str, str]:
    """A job's: each rank goes on exactly on the same type of device, else all its streams are seeded anew."""
    entry = manifest.entries.get(RANDOM)
    ranks = entry.tree.get("ranks") if entry and isinstance(entry.tree, dict) else None
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        return {}
    fates = {f"rank {i}": rank.get("device_type") for i, rank in enumerate(ranks)}
    return {
        rank: "continued"
        if saved == device_type
        else f"seeded anew: saved on {saved}, the target draws on {device_type}"
        for rank, saved in fates.items()
    }


def _of_streams(manifest: Manifest, device_type: str) -> dict[str, str]:
    saved = next((entry.tree for entry in manifest.entries.values() if entry.kind == "rng"), None)
    if not isinstance(saved, dict) or not isinstance(saved.get("torch"), dict):
        return {}
    streams = dict.fromkeys(HOST_STREAMS, "continued")
    if device_type not in saved["torch"]:
        streams[device_type] = (
            f"derived: saved on {', '.join(saved['torch'])}, no stream of {device_type} to go on with"
        )
    else:
        streams[device_type] = "continued"
    return streams
