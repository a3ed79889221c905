"""DCP's names (dotted paths) and ours (`entry/name`), for checkpoints that either side saved."""

from collections.abc import Iterator
from typing import Any

from workers.checkpoint.format.manifest import ENTRY, Entry, Manifest
from workers.checkpoint.format.optimizer_tree import read_optimizer

STATE = "state"
"""The entry for a state dict whose keys cannot be names of entries."""

Path = tuple[str | int, ...]


def entry_of(path: Path, many: bool) -> str:
    """Which entry a value goes to: its top-level key, where the state dict has nested ones."""
    first = path[0]
    return first if many and isinstance(first, str) and ENTRY.fullmatch(first) else STATE


def stored_name(path: Path, many: bool) -> str:
    entry = entry_of(path, many)
    rest = path[1:] if entry != STATE or (many and path[0] == STATE) else path
    return "/".join(map(str, (entry, *rest)))


def tensors_of(manifest: Manifest) -> dict[str, str]:
    """DCP's name -> ours, of all tensors that a state dict can ask for."""
    found: dict[str, str] = {}
    for name, entry in manifest.entries.items():
        if entry.kind == "module":
            found |= {tensor.replace("/", ".", 1): tensor for tensor in manifest.own(name)}
        elif entry.kind == "optimizer":
            found |= dict(_slots(name, entry))
        else:
            found |= {dotted: leaf["$tensor"] for dotted, leaf in leaves(name, entry) if _is_tensor(leaf)}
    return found


def values_of(manifest: Manifest) -> dict[str, Any]:
    """DCP's name -> the encoded value, of everything in plain entries that is not a tensor."""
    return {
        dotted: leaf
        for name, entry in manifest.entries.items()
        if entry.kind == "tree"
        for dotted, leaf in leaves(name, entry)
        if not _is_tensor(leaf)
    }


def leaves(name: str, entry: Entry) -> Iterator[tuple[str, Any]]:
    """What lies below the plain dicts of an entry, by dotted name. An entry `state` may stand for the whole dict."""
    prefix = "" if name == STATE and entry.type == STATE else name
    yield from _below(prefix, entry.tree)


def _below(prefix: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree and not next(iter(tree)).startswith("$"):
        for key, value in tree.items():
            yield from _below(f"{prefix}.{key}" if prefix else key, value)
    elif isinstance(tree, list) and any(_is_tensor(item) for item in tree):
        for i, value in enumerate(tree):
            yield from _below(f"{prefix}.{i}", value)
    else:
        yield prefix, tree


def _slots(name: str, entry: Entry) -> Iterator[tuple[str, str]]:
    """As torch's get_optimizer_state_dict names them: by the parameter's name within its model; and by numbers, as a
    plain state_dict has them, where the checkpoint has those."""
    found = read_optimizer(name, entry)
    for key, held in found.state.items():
        parameter = key if isinstance(key, str) else found.names.get(key, "")
        called = [parameter.partition("/")[2]] * bool(parameter) + [str(key)] * isinstance(key, int)
        tensors = {slot: leaf["$tensor"] for slot, leaf in held.items() if _is_tensor(leaf)}
        yield from ((f"{name}.state.{text}.{slot}", tensor) for text in called for slot, tensor in tensors.items())


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, dict) and "$tensor" in leaf
