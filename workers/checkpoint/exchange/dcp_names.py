"""Convert between DCP's names (dotted paths) and Polyfleet's (`entry/name`)."""

from collections.abc import Iterator
from typing import Any

from workers.checkpoint.format.manifest import ENTRY, Manifest, StateEntry
from workers.checkpoint.format.optimizer_tree import read_optimizer

STATE = "state"
"""Entry for a state dict whose keys are not valid entry names."""

Path = tuple[str | int, ...]


def entry_for(path: Path, is_nested: bool) -> str:
    """Return the entry of a value: its top-level key if the dict is nested and the key valid, else STATE."""
    first = path[0]
    return first if is_nested and isinstance(first, str) and ENTRY.fullmatch(first) else STATE


def stored_name(path: Path, is_nested: bool) -> str:
    entry = entry_for(path, is_nested)
    rest = path[1:] if entry != STATE or (is_nested and path[0] == STATE) else path
    return "/".join(map(str, (entry, *rest)))


def tensors_of(manifest: Manifest) -> dict[str, str]:
    """Map DCP's name to Polyfleet's, for all tensors that a state dict can request."""
    names: dict[str, str] = {}
    for name, entry in manifest.entries.items():
        if entry.kind == "module":
            names |= {tensor.replace("/", ".", 1): tensor for tensor in manifest.module_tensors(name)}
        elif entry.kind == "optimizer":
            names |= dict(_slots(name, entry))
        else:
            names |= {dotted: leaf["$tensor"] for dotted, leaf in leaves(name, entry) if _is_tensor(leaf)}
    return names


def values_of(manifest: Manifest) -> dict[str, Any]:
    """Map DCP's name to the encoded value, for everything in plain entries that is not a tensor."""
    return {
        dotted: leaf
        for name, entry in manifest.entries.items()
        if entry.kind == "tree"
        for dotted, leaf in leaves(name, entry)
        if not _is_tensor(leaf)
    }


def leaves(name: str, entry: StateEntry) -> Iterator[tuple[str, Any]]:
    """Yield the leaves below an entry's plain dicts, by dotted name. The entry `state` may be the full state dict."""
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


def _slots(name: str, entry: StateEntry) -> Iterator[tuple[str, str]]:
    """Yield names and tensors of optimizer slots, named as torch's get_optimizer_state_dict does.
    That is by the parameter's name within its model, and also by number, as in a plain state_dict, where the checkpoint
    has numbers.
    """
    optimizer = read_optimizer(name, entry)
    for key, slots in optimizer.state.items():
        parameter = key if isinstance(key, str) else optimizer.names.get(key, "")
        texts = [parameter.partition("/")[2]] * bool(parameter) + [str(key)] * isinstance(key, int)
        tensors = {slot: leaf["$tensor"] for slot, leaf in slots.items() if _is_tensor(leaf)}
        yield from ((f"{name}.state.{text}.{slot}", tensor) for text in texts for slot, tensor in tensors.items())


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, dict) and "$tensor" in leaf
