"""Read the tree of an optimizer's entry: groups with parameters and options, and state.

A parameter's key is the name of its tensor. If an imported file had only numbers, the key is the number; that needs
version 3 of the format. Options and slots are still encoded (tree.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from workers.checkpoint.format.manifest import VERSION, VERSION_WITH_NUMBERS, DamagedCheckpoint, StateEntry

Key = str | int

SHAPED_LIKE_PARAMETER = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum",
    "exp_inf", "prev", "step_size", "ax",
})  # fmt: skip
"""Slots that torch's own optimizers, and similar ones, create with `zeros_like(parameter)`."""


@dataclass(frozen=True, slots=True)
class OptimizerTree:
    """Content of an optimizer's tree.
    `names` maps numbered parameters to their tensors, for all or none: only if shapes and order allow no other mapping.
    """

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


def required_version(entries: dict[str, StateEntry]) -> int:
    """Return the version in which a checkpoint with `entries` is written: the oldest that can express them."""
    return VERSION_WITH_NUMBERS if any(map(is_numbered, entries.values())) else VERSION


def is_numbered(entry: StateEntry) -> bool:
    """Check whether an entry needs a reader of version 3."""
    return entry.kind == "optimizer" and read_optimizer("", entry).numbered


def read_optimizer(name: str, entry: StateEntry) -> OptimizerTree:
    """Read an optimizer's tree. Raises DamagedCheckpoint if it is not as docs/checkpoint-format.md specifies."""
    try:
        tree = entry.tree
        groups = tuple(tuple(group["parameters"]) for group in tree["groups"])
        options = tuple(dict(group["options"]) for group in tree["groups"])
        numbered = any(type(key) is int for group in groups for key in group)
        state: dict[Key, dict[str, Any]] = {
            int(key) if numbered else key: dict(slots) for key, slots in tree["state"].items()
        }
        names: dict[Key, str] = {int(key): str(text) for key, text in tree.get("names", {}).items()} if numbered else {}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise DamagedCheckpoint(f"entry {name!r}: the optimizer's tree is malformed: {e!r}") from None
    optimizer = OptimizerTree(groups, options, state, names)
    if fault := _fault(optimizer):
        raise DamagedCheckpoint(f"entry {name!r}: the optimizer's tree is malformed: {fault}")
    return optimizer


def _fault(optimizer: OptimizerTree) -> str:
    keys = optimizer.keys
    if any(type(key) not in (int, str) for key in keys):
        return "its parameters have neither names nor numbers"
    if not optimizer.numbered:
        return ""
    if any(type(key) is not int for key in keys) or len(set(keys)) != len(keys):
        return "its parameters do not have distinct numbers"
    if set(optimizer.state) - set(keys):
        return "it has state of parameters that are in no group"
    if optimizer.names and (set(optimizer.names) != set(keys) or len(set(optimizer.names.values())) != len(keys)):
        return "it does not have one name for each number"
    return ""


def as_torch(optimizer: OptimizerTree, decode: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a state_dict for torch.optim, with the optimizer's own numbers or numbered in order."""
    numbers: dict[Key, int] = {}
    for key in optimizer.keys:
        numbers.setdefault(key, key if isinstance(key, int) else len(numbers))
    groups = [
        {**decode(options), "params": [numbers[key] for key in group]}
        for group, options in zip(optimizer.groups, optimizer.options, strict=True)
    ]
    state = {
        numbers[key]: decode(slots) for key, slots in optimizer.state.items() if key in numbers
    }  # the rest is in no group
    return {"state": state, "param_groups": groups}
