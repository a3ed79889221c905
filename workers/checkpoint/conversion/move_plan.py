"""Predict a load on another kind of device: what stays as it is, what is converted or refused, and whether it fits."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from cluster import catalogue
from cluster.catalogue import EMULATED
from cluster.errors import UserError
from workers.checkpoint.conversion.target_dtypes import DtypeDecision, decide_dtype, notes, unsupported_dtypes
from workers.checkpoint.format.dtypes import DTYPES
from workers.checkpoint.format.manifest import RANDOM, Manifest, TensorEntry
from workers.checkpoint.format.manifest_checks import read_manifest, tensor_bytes

HOST_STREAMS = ("python", "numpy", "cpu")


def plan(path: str | Path, to: str, count: int = 1, *, follow_links: bool = True) -> dict[str, Any]:
    """Predict a load with dtype="native" on `count` devices of kind `to`, such as "tpu:v5e" or "amd".

    "ok" is False if a dtype is refused or the devices are certainly too small. "memory"."fits" is `replicated` (each
    device has enough memory for everything), `sharded`, `no` or `unknown`. "cannot_follow" has a sentence for each
    thing that is lost. Only the manifest is read. Raises UserError for an unknown kind.
    """
    if count < 1:
        raise UserError(f"count is {count}", "plan for at least one device")
    kind = catalogue.resolve_kind(to)
    manifest = read_manifest(Path(path), follow_links)
    unsupported = unsupported_dtypes(kind)
    decisions = {
        name: decide_dtype(tensor, tensor.dtype, unsupported) for name, tensor in _device_tensors(manifest).items()
    }
    dtypes = _dtypes(manifest, decisions, kind)
    memory = _memory(manifest, decisions, kind, count)
    random = _random(manifest, catalogue.vendor(kind.partition(":")[0]).torch_device)
    return {
        "step": manifest.step,
        "source": {"backend": manifest.producer.backend, "kind": manifest.producer.kind, "world": manifest.world.size},
        "target": {"backend": kind.partition(":")[0], "kind": kind, "count": count},
        "bytes": manifest.size_bytes(),
        "ok": all(line["action"] != "refuse" for line in dtypes) and memory["fits"] != "no",
        "dtypes": dtypes,
        "memory": memory,
        "reshard": _reshard(manifest, count),
        "random": random,
        "cannot_follow": _loss_sentences(dtypes, memory, random),
    }


def _device_tensors(manifest: Manifest) -> dict[str, TensorEntry]:
    """Return the tensors that are loaded on the device: all but random states and numpy arrays."""
    states = f"{RANDOM}/ranks/"
    return {
        name: tensor
        for name, tensor in manifest.stored().items()
        if tensor.role not in ("rng", "array") and not name.startswith(states)
    }


def _dtypes(manifest: Manifest, decisions: dict[str, DtypeDecision], kind: str) -> list[dict[str, Any]]:
    """One row per dtype and decision: tensors with a scale, and states, may be handled differently."""
    groups: dict[tuple[str, DtypeDecision], list[str]] = defaultdict(list)
    for name, decision in decisions.items():
        groups[manifest.tensors[name].dtype, decision].append(name)
    dtype_notes = notes(kind)
    return [
        {
            "dtype": dtype,
            "tensors": len(names),
            "bytes": sum(tensor_bytes(manifest.tensors[name]) for name in names),
            "action": decision.action,
            "to": decision.to,
            "may_lose": decision.may_lose,
            "reason": decision.reason or dtype_notes.get(dtype, ""),
            "example": names[0],
        }
        for (dtype, decision), names in sorted(groups.items(), key=lambda group: (group[0][0], group[0][1].to))
    ]


def _memory(manifest: Manifest, decisions: dict[str, DtypeDecision], kind: str, count: int) -> dict[str, Any]:
    """Compare weights and states with device memory. What else a step needs is not in a checkpoint."""
    tensors = manifest.tensors
    needed_bytes = sum(
        math.prod(tensors[name].shape) * DTYPES[decision.to].bytes for name, decision in decisions.items()
    )
    device_bytes = _device_bytes(kind)
    fits = "unknown"
    if device_bytes is not None:
        per_device_bytes = -(-needed_bytes // count)
        fits = "replicated" if needed_bytes <= device_bytes else "sharded" if per_device_bytes <= device_bytes else "no"
    return {"needed_bytes": needed_bytes, "device_bytes": device_bytes, "fits": fits}


def _device_bytes(kind: str) -> int | None:
    """Memory of the smallest model that the kind can mean, or None if the catalogue has none."""
    if ":" not in kind or kind.endswith(f":{EMULATED}"):
        return None
    sizes = [size for row in catalogue.same_family(kind) if (size := row.memory_per_device_bytes)]
    return min(sizes, default=None)


def _reshard(manifest: Manifest, count: int) -> dict[str, Any]:
    sharded = [name for name, tensor in manifest.stored().items() if len(tensor.shards) > 1]
    return {"from": manifest.world.size, "mesh": list(manifest.world.mesh), "to": count, "tensors_cut": len(sharded)}


def _random(manifest: Manifest, device_type: str) -> dict[str, str]:
    return _rank_streams(manifest, device_type) or _device_streams(manifest, device_type)


def _rank_streams(manifest: Manifest, device_type: str) -> dict[str, str]:
    """Random streams of a job's ranks: continued on the same device type, else all of them are reseeded."""
    entry = manifest.entries.get(RANDOM)
    ranks = entry.tree.get("ranks") if entry and isinstance(entry.tree, dict) else None
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        return {}

    device_types = {f"rank {i}": rank.get("device_type") for i, rank in enumerate(ranks)}
    return {
        rank: "continued" if saved == device_type else f"reseeded: saved on {saved}, the target draws on {device_type}"
        for rank, saved in device_types.items()
    }


def _device_streams(manifest: Manifest, device_type: str) -> dict[str, str]:
    saved = next((entry.tree for entry in manifest.entries.values() if entry.kind == "rng"), None)
    if not isinstance(saved, dict) or not isinstance(saved.get("torch"), dict):
        return {}
    streams = dict.fromkeys(HOST_STREAMS, "continued")
    if device_type not in saved["torch"]:
        streams[device_type] = f"derived: saved on {', '.join(saved['torch'])}, no stream of {device_type} to continue"
    else:
        streams[device_type] = "continued"
    return streams


def _loss_sentences(dtypes: list[dict[str, Any]], memory: dict[str, Any], random: dict[str, str]) -> list[str]:
    refused = [f"{d['tensors']} tensors of {d['dtype']}: {d['reason']}" for d in dtypes if d["action"] == "refuse"]
    restarted = [f"random numbers of {name}: {fate}" for name, fate in random.items() if fate != "continued"]
    too_small = (
        [
            f"{memory['needed_bytes'] / 2**30:.1f} GiB of state do not fit on devices of"
            f" {memory['device_bytes'] / 2**30:.1f} GiB"
        ]
        if memory["fits"] == "no"
        else []
    )
    return refused + restarted + too_small
