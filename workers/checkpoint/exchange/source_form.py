"""The form of an imported file, so that an export gives the same file back to the program that wrote it.

An entry of a checkpoint says what we understood: this is a model, that the state of an optimizer. The form says where
it stood: the structure, the order of keys and the type of each value. It is a tree (format/tree.py) with more leaves:

    {"$entry": "model"}                       all of an entry, as an export renders it
    {"$state_dict": ["model", null]}          the same as an OrderedDict, and torch's `_metadata` of it
    {"$module_state": [{..}, {..}]}           an OrderedDict that is no entry, and its `_metadata`
    {"$namespace": {..}} {"$path": "a/b"}     argparse.Namespace, a pathlib.Path
    {"$size": {"$tuple": [2, 3]}} {"$dtype": "float16"} {"$device": "cuda:0"}

Values that are no entry are repeated here; tensors are not, they are named.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from workers.checkpoint.exchange.optimizer_state import OptimizerStateDict
from workers.checkpoint.exchange.typed import ModuleState, Typed
from workers.checkpoint.format import tree
from workers.checkpoint.format.optimizer_tree import OptimizerTree, as_torch

ROOT_DEPTH = -4
"""A form has an entry's value some levels deeper than the entry has it."""
NESTED = 2
"""Levels of a file at which entries may stand: {"optimizer_states": [entry]}."""


class EntryOf:
    """Stands for a value that has become an entry. `value` is what the file had."""

    def __init__(self, name: str, value: Any):
        self.name, self.value = name, value


def with_entries(value: Any, entry_of: dict[int, str], levels: int = NESTED) -> Any:
    """`value` with an EntryOf in place of each value that has become an entry; "" is one that was left out."""
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


def encode_form(value: Any, where: str, leaf: tree.Leaf, entry: Callable[[EntryOf, tree.Leaf], Any]) -> Any:
    """The form of `value`; `entry` answers for an EntryOf, `leaf` for tensors and arrays."""

    def more(found: Any, there: str) -> Any:
        if isinstance(found, EntryOf):
            return entry(found, more)
        if isinstance(found, Typed):
            return {found.tag: tree.encode(found.form(), there, more)}
        return leaf(found, there)

    return tree.encode(value, where, more, ROOT_DEPTH)


def state_dict(name: str, value: Any) -> Any:
    """The form of a module: its tensors are those of the entry, in order."""
    if type(value) is dict:
        return {"$entry": name}
    versions = value.versions if isinstance(value, ModuleState) else None
    return {"$state_dict": [name, tree.encode(versions, f"{name}._metadata", tree.raise_unsupported)]}


def renders(value: Any, found: OptimizerStateDict) -> bool:
    """Whether an export of the entry that was made of `found` gives `value` again, with each key in its place."""
    rendered = as_torch(OptimizerTree(found.groups, found.options, found.state, {}), lambda raw: raw)
    return _same(rendered, value)


def _same(a: Any, b: Any) -> bool:
    """Leaves are the same objects, where they are the same at all."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*map(_key, a)] == [*map(_key, b)] and all(map(_same, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, int | str) and bool(a == b)


def _key(key: Any) -> tuple[type, Any]:
    return type(key), key
