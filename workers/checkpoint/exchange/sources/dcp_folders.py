"""Read folders of torch.distributed.checkpoint, whose `.metadata` and tensor heads are pickles.

Megatron's `torch_dist` is such a folder, with a file beside it. Source: megatron/core/dist_checkpointing,
strategies/common.py (`common.pt`) and core.py (`metadata.json`).
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.input import sandbox
from cluster.input.untrusted_files import UnreadableFile, read_bytes
from workers.checkpoint.exchange.pickles import pickle_symbols
from workers.checkpoint.exchange.pickles.pickle_symbols import PickledCall
from workers.checkpoint.exchange.pickles.pickle_values import PickleDecoder
from workers.checkpoint.exchange.pickles.tensors import ForeignTensor, Parts, Reference
from workers.checkpoint.exchange.pickles.torch_archive import Archive
from workers.checkpoint.exchange.sources.optimizer_state import MAX_PARAMETERS, is_optimizer
from workers.checkpoint.format.links import resolve_links
from workers.checkpoint.format.manifest_checks import open_regular
from workers.errors import CheckpointError

COMMON_FILE = "common.pt"
"""Megatron's iteration, schedulers and args. In its args are enumerations, which cannot be imported."""
EXTRA_FILES = ("meta.pt", COMMON_FILE)
"""Files for everything that is not sharded; Lightning's has the step, loops, callbacks and schedulers."""
_REASONS = {"metadata.json": "it says which library wrote the folder"}
_Location = tuple[Path, int, int]
"""File, offset and length."""


def read_dcp(source: Path, plain: PickleDecoder) -> tuple[Any, set[str]]:
    """Return the state dict that was saved, and the names of the files that have it. Raises CheckpointError."""
    metadata_path = source / ".metadata"
    os.close(open_regular(metadata_path))  # raises with the reason if it is not a readable file
    sandbox.raise_limits(metadata_bytes=min(metadata_path.stat().st_size, pickle_symbols.MAX_PICKLE_BYTES))
    try:
        pickled = read_bytes(resolve_links(metadata_path), pickle_symbols.MAX_PICKLE_BYTES)
    except UnreadableFile as e:
        raise CheckpointError(e.message, "check that the folder is complete, then run it again") from None
    metadata = pickle_symbols.read(pickled, str(metadata_path))
    try:
        locations: dict[str, dict[tuple[int, ...], _Location]] = {}
        for key, value in metadata.state["storage_data"].items():
            fqn, offset = _index(key)
            locations.setdefault(fqn, {})[offset] = _location(source, value)
        tensor_metadata = {_text(fqn): meta for fqn, meta in metadata.state["state_dict_metadata"].items()}
        paths = metadata.state.get("planner_data") or {}
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as e:
        raise CheckpointError(
            f"{metadata_path} is not metadata of DCP: {e!r:.200}",
            "check that the folder is complete, then run it again",
        ) from None
    _check_overlaps(metadata_path, [location for parts in locations.values() for location in parts.values()])
    nested: dict[Any, Any] = {}
    for fqn, meta in tensor_metadata.items():
        parts = locations.get(fqn, {})
        if meta.what.endswith("BytesStorageMetadata"):
            value = _read_item(next(iter(parts.values())), plain, fqn)
        else:
            value = _join_parts(
                fqn, meta, {offset: _read_item(location, plain, fqn) for offset, location in parts.items()}
            )
        _put(nested, tuple(paths.get(fqn, (fqn,))), value)
    return _restore_lists(nested), {file.name for parts in locations.values() for file, _, _ in parts.values()}


def reason_left_out(name: str) -> str:
    """Return why a file of such a folder is not imported."""
    if name.endswith(".distcp"):
        return "the .metadata beside it does not name this file: it belongs to another save"
    return _REASONS.get(name, "it is not part of the checkpoint")


def _check_overlaps(metadata_path: Path, locations: "list[_Location]") -> None:
    """Check that items do not overlap: otherwise a small file could be read any number of times."""
    for (file, start, size), (other, next_start, _) in pairwise(sorted(locations)):
        if file == other and start + size > next_start:
            raise CheckpointError(
                f"{metadata_path} has items that overlap in {file.name}",
                "do not use this folder: no standard program writes such files",
            )


def _index(key: Any) -> tuple[str, tuple[int, ...]]:
    offset = key.state.get("offset")
    return _text(key.state["fqn"]), _sizes(offset) if offset is not None else ()


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a name is a {type(value).__name__}")
    return value


def _sizes(size: PickledCall) -> tuple[int, ...]:
    """Return the sizes in a torch.Size."""
    sizes = tuple(size.arguments[0])
    if len(sizes) > 64 or any(type(n) is not int or not 0 <= n < 2**63 for n in sizes):
        raise TypeError("a size has non-negative integers")
    return sizes


def _location(source: Path, value: PickledCall) -> _Location:
    fields = value.state
    name = fields["relative_path"]
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{source / '.metadata'} names the file {name!r}", "keep all files of DCP in that folder")
    if fields.get("transform_descriptors"):
        raise CheckpointError(f"{source} is compressed or encrypted", "save it without extensions")
    numbers = (fields["offset"], fields["length"])
    if any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
        raise TypeError("offset and length are non-negative integers")
    return source / name, *numbers


def _read_item(location: _Location, plain: PickleDecoder, fqn: str) -> Any:
    archive = Archive(*location)
    plain.allow(fqn, archive.pickle_bytes)
    return plain.value(archive.value, fqn)


def _join_parts(fqn: str, meta: PickledCall, parts: dict[tuple[int, ...], Any]) -> Any:
    """Return a tensor. A sharded one stays in parts, which the importer writes as shards of one tensor."""
    size = _sizes(meta.state["size"])
    if any(part is None for part in parts.values()):
        return None  # a part was refused
    if len(parts) == 1 and isinstance(only := next(iter(parts.values())), ForeignTensor) and only.shape == size:
        return only
    references = {offset: part for offset, part in parts.items() if isinstance(part, Reference)}
    if not references or len(references) != len(parts):
        raise CheckpointError(
            f"{fqn:.200} has parts that are not tensors", "check that the folder is complete, then run it again"
        )
    return Parts(size, references)


def _put(tree: dict[Any, Any], path: tuple[Any, ...], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _restore_numbers(state: dict[Any, Any], groups: list[dict[str, Any]]) -> dict[Any, Any]:
    """Restore an optimizer's state: DCP writes numbers as text, and leaves out what is empty."""
    numbers = (key for group in groups for key in group["params"] if type(key) is int and 0 <= key < MAX_PARAMETERS)
    by_text = {str(key): key for key in numbers}
    return {by_text.get(key, key): _restore_lists(slots) for key, slots in state.items()}


def _restore_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    items = {key: _restore_lists(value) for key, value in tree.items()}
    if is_optimizer(items | {"state": {}}):
        state = tree.get("state", {})
        return items | {"state": _restore_numbers(state, items["param_groups"]) if isinstance(state, dict) else state}
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[i] for i in sorted(items)]
    return items
