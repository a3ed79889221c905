"""Versions of the format: the oldest sufficient one is written; every published one stays readable."""

from typing import Any

from workers.checkpoint.format.manifest import VERSION, VERSION_WITH_NUMBERS, StateEntry
from workers.checkpoint.format.optimizer_tree import is_numbered

READABLE_VERSIONS = (1, VERSION, VERSION_WITH_NUMBERS)


def required_version(entries: dict[str, StateEntry]) -> int:
    """Return the version in which a checkpoint with `entries` is written."""
    return VERSION_WITH_NUMBERS if any(map(is_numbered, entries.values())) else VERSION


def upgrade(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a manifest's JSON from version 1 to 2. Its digest was checked before, on the original."""
    if data.get("version") != 1 or not isinstance(data.get("tensors"), dict):
        return data
    tensors = {name: _of_version_1(tensor) for name, tensor in data["tensors"].items()}
    return data | {"version": 2, "tensors": tensors}


def _of_version_1(tensor: Any) -> Any:
    """Convert one tensor. Version 1 stored each tensor once, at `file` and `offset`, and had no shards or views."""
    if not isinstance(tensor, dict) or "file" not in tensor:
        return tensor
    rest = {key: value for key, value in tensor.items() if key not in ("file", "offset")}
    return rest | {"shards": [{"file": tensor["file"], "offset": tensor.get("offset", 0)}]}
