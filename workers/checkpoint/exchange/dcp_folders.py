"""Folders of torch.distributed.checkpoint: `.metadata` is a pickle, and so is the head of every tensor."""

from pathlib import Path
from typing import Any

from workers.checkpoint.exchange import symbols
from workers.checkpoint.exchange.archive import Archive
from workers.checkpoint.exchange.optimizers import MOST, is_optimizer
from workers.checkpoint.exchange.symbols import Call
from workers.checkpoint.exchange.values import Parts, Plain, Reference
from workers.errors import CheckpointError


def read_dcp(source: Path, plain: Plain) -> Any:
    """The state dict that was saved. Raises CheckpointError."""
    metadata = symbols.read((source / ".metadata").read_bytes(), str(source / ".metadata"))
    try:
        places = {_index(key): _place(source, value) for key, value in metadata.state["storage_data"].items()}
        described = metadata.state["state_dict_metadata"]
        paths = metadata.state.get("planner_data") or {}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{source / '.metadata'} is no metadata of DCP: {e!r}", "is it complete?") from None
    nested: dict[Any, Any] = {}
    for fqn, meta in described.items():
        parts = {offset: place for (name, offset), place in places.items() if name == fqn}
        if meta.what.endswith("BytesStorageMetadata"):
            value = plain.value(_blob(next(iter(parts.values()))), fqn)
        else:
            value = _joined(fqn, meta, {offset: plain.value(_blob(p), fqn) for offset, p in parts.items()})
        _put(nested, tuple(paths.get(fqn, (fqn,))), value)
    return _listed(nested)


def _index(key: Any) -> tuple[str, tuple[int, ...]]:
    offset = key.state.get("offset")
    return key.state["fqn"], tuple(offset.arguments[0]) if offset is not None else ()


def _place(source: Path, value: Call) -> tuple[Path, int, int]:
    told = value.state
    name = told["relative_path"]
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{source / '.metadata'} names the file {name!r}", "files of DCP lie beside it")
    if told.get("transform_descriptors"):
        raise CheckpointError(f"{source} is compressed or encrypted", "save it without extensions")
    return source / name, int(told["offset"]), int(told["length"])


def _blob(place: tuple[Path, int, int]) -> Any:
    return Archive(*place).value


def _joined(fqn: str, meta: Call, parts: dict[tuple[int, ...], Any]) -> Any:
    """A tensor; one that ranks have cut stays in its parts, which the importer writes as shards of one."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return Parts(tuple(meta.state["size"].arguments[0]), {k: v for k, v in parts.items() if isinstance(v, Reference)})


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
