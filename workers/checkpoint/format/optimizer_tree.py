"""The tree of an optimizer's entry, whoever wrote it: groups of parameters with their options, and the state of each.

A parameter goes by the name of its tensor. Where an imported file told numbers only, it goes by its number; that is
version 3 of the format. Everything below options and slots is still encoded (tree.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from workers.checkpoint.format.manifest import DamagedCheckpoint, Entry

Key = str | int

SHAPED_LIKE_PARAMETER = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum",
    "exp_inf", "prev", "step_size", "ax",
})  # fmt: skip
"""Slots that torch's own optimizers, and those written like them, make with `zeros_like(parameter)`."""


@dataclass(frozen=True, slots=True)
class OptimizerTree:
    """`names` has the tensors' names of numbered parameters, where shapes and order allow no other: all, or none."""

    groups: tuple[tuple[Key, ...], ...]
    options: tuple[dict[str, Any], ...]
    state: dict[Key, dict[str, Any]]
    names: dict[Key, str]

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(chain.from_iterable(self.groups))

    @property
    def numbered(self) -> bool:
        return any(isinstance(key, int) for key in self.keys)


def is_numbered(entry: Entry) -> bool:
    """Whether an entry needs a reader of version 3."""
    return entry.kind == "optimizer" and read_optimizer("", entry).numbered


def read_optimizer(name: str, entry: Entry) -> OptimizerTree:
    """Raises DamagedCheckpoint where the tree of entry `name` has not the form that docs/checkpoint-format.md says."""
    try:
        tree = entry.tree
        groups = tuple(tuple(group["parameters"]) for group in tree["groups"])
        options = tuple(dict(group["options"]) for group in tree["groups"])
        numbered = any(type(key) is int for group in groups for key in group)
        state: dict[Key, dict[str, Any]] = {
            int(key) if numbered else key: dict(slots) for key, slots in tree["state"].items()
        }
        names: dict[Key, str] = {int(key): str(told) for key, told in tree.get("names", {}).items()} if numbered else {}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise DamagedCheckpoint(f"entry {name!r}: the optimizer's tree is malformed: {e!r}") from None
    found = OptimizerTree(groups, options, state, names)
    if fault := _fault(found):
        raise DamagedCheckpoint(f"entry {name!r}: the optimizer's tree is malformed: {fault}")
    return found


def _fault(found: OptimizerTree) -> str:
    keys = found.keys
    if any(type(key) not in (int, str) for key in keys):
        return "its parameters have neither names nor numbers"
    if not found.numbered:
        return ""
    if any(type(key) is not int for key in keys) or len(set(keys)) != len(keys):
        return "its parameters are not told apart by numbers"
    if set(found.state) - set(keys):
        return "it has state of parameters that are in no group"
    if found.names and (set(found.names) != set(keys) or len(set(found.names.values())) != len(keys)):
        return "its names are not one for each number"
    return ""


def as_torch(found: OptimizerTree, decode: Callable[[Any], Any]) -> dict[str, Any]:
    """A state_dict of torch.optim: its own numbers where it has some, else those of the order of the groups."""
    numbers: dict[Key, int] = {}
    for key in found.keys:
        numbers.setdefault(key, key if isinstance(key, int) else len(numbers))
    groups = [
        {**decode(options), "params": [numbers[key] for key in group]}
        for group, options in zip(found.groups, found.options, strict=True)
    ]
    held = {numbers[key]: decode(slots) for key, slots in found.state.items() if key in numbers}  # others train nothing
    return {"state": held, "param_groups": groups}
