"""Folders of torch.distributed.checkpoint: `.metadata` is a pickle, and so is the head of every tensor."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster import sandbox
from cluster.untrusted_files import UnreadableFile, read_bytes
from workers.checkpoint.exchange import pickle_symbols
from workers.checkpoint.exchange.optimizer_state import MOST, is_optimizer
from workers.checkpoint.exchange.pickle_symbols import PickledCall
from workers.checkpoint.exchange.pickle_values import PickleDecoder
from workers.checkpoint.exchange.tensors import ForeignTensor, Parts, Reference
from workers.checkpoint.exchange.torch_archive import Archive
from workers.checkpoint.format.links import real
from workers.checkpoint.format.manifest_checks import open_regular
from workers.errors import CheckpointError

BESIDE = "meta.pt"
"""What Lightning keeps of a sharded checkpoint beside its tensors: step, loops, callbacks, schedulers."""
_Place = tuple[Path, int, int]
"""File, offset and length."""


def read_dcp(source: Path, plain: PickleDecoder) -> Any:
    """The state dict that was saved. Raises CheckpointError."""
    where = source / ".metadata"
    os.close(open_regular(where))  # which says what is wrong with it, if anything is
    sandbox.raise_limits(metadata_bytes=min(where.stat().st_size, pickle_symbols.LARGEST_BYTES))
    try:
        pickled = read_bytes(real(where), pickle_symbols.LARGEST_BYTES)
    except UnreadableFile as e:
        raise CheckpointError(e.message, "check that the folder is complete, then run it again") from None
    metadata = pickle_symbols.read(pickled, str(where))
    try:
        places: dict[str, dict[tuple[int, ...], _Place]] = {}
        for key, value in metadata.state["storage_data"].items():
            fqn, offset = _index(key)
            places.setdefault(fqn, {})[offset] = _place(source, value)
        described = {_text(fqn): meta for fqn, meta in metadata.state["state_dict_metadata"].items()}
        paths = metadata.state.get("planner_data") or {}
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as e:
        raise CheckpointError(
            f"{where} is not metadata of DCP: {e!r:.200}", "check that the folder is complete, then run it again"
        ) from None
    _check_apart(where, [place for parts in places.values() for place in parts.values()])
    nested: dict[Any, Any] = {}
    for fqn, meta in described.items():
        parts = places.get(fqn, {})
        if meta.what.endswith("BytesStorageMetadata"):
            value = _blob(next(iter(parts.values())), plain, fqn)
        else:
            value = _joined(fqn, meta, {offset: _blob(place, plain, fqn) for offset, place in parts.items()})
        _put(nested, tuple(paths.get(fqn, (fqn,))), value)
    return _listed(nested)


def _check_apart(where: Path, places: "list[_Place]") -> None:
    """Every item has bytes of its own: else a small file could be read any number of times."""
    for (file, start, size), (other, after, _) in pairwise(sorted(places)):
        if file == other and start + size > after:
            raise CheckpointError(f"{where} has items that overlap in {file.name}", "no program writes such a file")


def _index(key: Any) -> tuple[str, tuple[int, ...]]:
    offset = key.state.get("offset")
    return _text(key.state["fqn"]), _sizes(offset) if offset is not None else ()


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a name is a {type(value).__name__}")
    return value


def _sizes(size: PickledCall) -> tuple[int, ...]:
    """Of a torch.Size."""
    found = tuple(size.arguments[0])
    if len(found) > 64 or any(type(n) is not int or not 0 <= n < 2**63 for n in found):
        raise TypeError("a size has whole numbers")
    return found


def _place(source: Path, value: PickledCall) -> _Place:
    told = value.state
    name = told["relative_path"]
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{source / '.metadata'} names the file {name!r}", "files of DCP lie beside it")
    if told.get("transform_descriptors"):
        raise CheckpointError(f"{source} is compressed or encrypted", "save it without extensions")
    numbers = (told["offset"], told["length"])
    if any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
        raise TypeError("offset and length are whole numbers")
    return source / name, *numbers


def _blob(place: _Place, plain: PickleDecoder, fqn: str) -> Any:
    archive = Archive(*place)
    plain.allow(fqn, archive.pickle_bytes)
    return plain.value(archive.value, fqn)


def _joined(fqn: str, meta: PickledCall, parts: dict[tuple[int, ...], Any]) -> Any:
    """A tensor; one that ranks have cut stays in its parts, which the importer writes as shards of one."""
    size = _sizes(meta.state["size"])
    if any(part is None for part in parts.values()):
        return None  # a part was refused
    if len(parts) == 1 and isinstance(only := next(iter(parts.values())), ForeignTensor) and only.shape == size:
        return only
    cut = {offset: part for offset, part in parts.items() if isinstance(part, Reference)}
    if not cut or len(cut) != len(parts):
        raise CheckpointError(
            f"{fqn:.200} has parts that are not tensors", "check that the folder is complete, then run it again"
        )
    return Parts(size, cut)


def _put(tree: dict[Any, Any], path: tuple[Any, ...], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _numbered(state: dict[Any, Any], groups: list[dict[str, Any]]) -> dict[Any, Any]:
    """The state of an optimizer as it was saved: DCP writes numbers as text, and leaves out what is empty."""
    numbers = (key for group in groups for key in group["params"] if type(key) is int and 0 <= key < MOST)
    by_text = {str(key): key for key in numbers}
    return {by_text.get(key, key): _listed(slots) for key, slots in state.items()}


def _listed(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    items = {key: _listed(value) for key, value in tree.items()}
    if is_optimizer(items | {"state": {}}):
        state = tree.get("state", {})
        return items | {"state": _numbered(state, items["param_groups"]) if isinstance(state, dict) else state}
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[i] for i in sorted(items)]
    return items
