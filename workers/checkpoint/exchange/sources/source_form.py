"""The form of an imported file, from which an export restores the same file.

Entries say what was recognized: a model, the state of an optimizer. The form says where it was in the file: the
structure, the order of keys and the type of each value. It is a tree (format/tree.py) with more leaves:

    {"$entry": "model"}                       all of an entry, as an export renders it
    {"$state_dict": ["model", null]}          the same as an OrderedDict, and torch's `_metadata` of it
    {"$module_state": [{..}, {..}]}           an OrderedDict that is not an entry, and its `_metadata`
    {"$namespace": {..}} {"$path": "a/b"}     argparse.Namespace, a pathlib.Path
    {"$size": {"$tuple": [2, 3]}} {"$dtype": "float16"} {"$device": "cuda:0"}

Values that are not in an entry are stored here; tensors are only named.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from workers.checkpoint.exchange.pickles.typed import ModuleState, TypedValue
from workers.checkpoint.exchange.sources.optimizer_state import OptimizerStateDict
from workers.checkpoint.format import tree
from workers.checkpoint.format.optimizer_tree import OptimizerTree, as_torch

ROOT_DEPTH = -4
"""Start depth of a form, in which an entry's value is some levels deeper than in the entry."""
ENTRY_LEVELS = 2
"""Maximum level of a file at which entries may occur: {"optimizer_states": [entry]}."""


class EntryOf:
    """Placeholder for a value that has become an entry. `value` is what the file had."""

    def __init__(self, name: str, value: Any):
        self.name, self.value = name, value


def with_entries(value: Any, entry_of: dict[int, str], levels: int = ENTRY_LEVELS) -> Any:
    """Replace each value that has become an entry by an EntryOf; its name is "" if it was left out."""
    if (name := entry_of.get(id(value))) is not None:
        return EntryOf(name, value)
    if levels and type(value) in (dict, OrderedDict):
        items = ((key, with_entries(item, entry_of, levels - 1)) for key, item in value.items())
        return type(value)((key, item) for key, item in items if not _left_out(item))
    if levels and type(value) is list:
        return [item for item in (with_entries(item, entry_of, levels - 1) for item in value) if not _left_out(item)]
    return value


def _left_out(value: Any) -> bool:
    return isinstance(value, EntryOf) and not value.name


def encode_form(value: Any, path: str, leaf: tree.Leaf, entry: Callable[[EntryOf, tree.Leaf], Any]) -> Any:
    """Return the form of `value`; `entry` encodes an EntryOf, `leaf` tensors and arrays."""

    def encode_leaf(item: Any, inner_path: str) -> Any:
        if isinstance(item, EntryOf):
            return entry(item, encode_leaf)
        if isinstance(item, TypedValue):
            return {item.tag: tree.encode(item.form(), inner_path, encode_leaf)}
        return leaf(item, inner_path)

    return tree.encode(value, path, encode_leaf, ROOT_DEPTH)


def state_dict(name: str, value: Any) -> Any:
    """Return the form of a module: its tensors are those of the entry, in order."""
    if type(value) is dict:
        return {"$entry": name}
    versions = value.versions if isinstance(value, ModuleState) else None
    return {"$state_dict": [name, tree.encode(versions, f"{name}._metadata", tree.raise_unsupported)]}


def is_restored_by_export(value: Any, optimizer: OptimizerStateDict) -> bool:
    """Check whether an export of the entry made from `optimizer` restores `value` exactly."""
    exported = as_torch(OptimizerTree(optimizer.groups, optimizer.options, optimizer.state, {}), lambda raw: raw)
    return _is_equal(exported, value)


def _is_equal(a: Any, b: Any) -> bool:
    """Compare values. Leaves are the same objects, if they are equal at all."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*map(_key, a)] == [*map(_key, b)] and all(map(_is_equal, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return isinstance(a, int | str) and bool(a == b)


def _key(key: Any) -> tuple[type, Any]:
    return type(key), key
