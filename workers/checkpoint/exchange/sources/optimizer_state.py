"""Detect and check optimizers' state dicts: {"state": {number: slots}, "param_groups": […]}.

Source: torch.optim.Optimizer.state_dict; torch.distributed.checkpoint.state_dict writes names instead of the numbers.
"""

from dataclasses import dataclass
from typing import Any

from workers.checkpoint.format.message_text import key_text
from workers.checkpoint.format.optimizer_tree import SHAPED_LIKE_PARAMETER, Key

MAX_PARAMETERS = 1_000_000
"""Maximum number of parameters, and of groups, that fit a manifest."""


class NotOptimizerStateError(ValueError):
    """A value looks like an optimizer's state dict, but its content is not valid."""


@dataclass(frozen=True, slots=True)
class OptimizerStateDict:
    """A checked state dict of an optimizer: every key is in one group, and all state has such a key."""

    groups: tuple[tuple[Key, ...], ...]
    options: tuple[dict[str, Any], ...]
    state: dict[Key, dict[str, Any]]

    @property
    def keys(self) -> list[Key]:
        return [key for group in self.groups for key in group]

    @property
    def numbered(self) -> bool:
        return isinstance(self.keys[0], int)

    def with_numbers(self) -> "OptimizerStateDict":
        """Return it with numbers in the order of the groups, as torch.optim itself numbers them."""
        numbers: dict[Key, Key] = {key: number for number, key in enumerate(self.keys)}
        groups = tuple(tuple(numbers[key] for key in group) for group in self.groups)
        return OptimizerStateDict(groups, self.options, {numbers[key]: slots for key, slots in self.state.items()})

    def shape_of(self, key: Key) -> tuple[int, ...] | None:
        """Return the parameter's shape if its state shows it, else None."""
        slots = self.state.get(key, {})
        shapes = {getattr(value, "shape", None) for slot, value in slots.items() if slot in SHAPED_LIKE_PARAMETER}
        shapes.discard(None)
        return shapes.pop() if len(shapes) == 1 else None


def is_optimizer(value: Any) -> bool:
    groups = value.get("param_groups") if isinstance(value, dict) else None
    return (
        isinstance(groups, list)
        and bool(groups)
        and isinstance(value.get("state"), dict)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list | tuple) for group in groups)
    )


def optimizers_in(value: Any) -> dict[str, Any]:
    """Return the optimizers in a list or dict of nothing else, by index or key (GANs, Lightning)."""
    if isinstance(value, dict):
        items = {key: item for key, item in value.items() if isinstance(key, str)}
    else:
        items = {str(i): item for i, item in enumerate(value)} if isinstance(value, list) else {}
    return items if items and len(items) == len(value) and all(map(is_optimizer, items.values())) else {}


def not_portable_reason(value: dict[str, Any]) -> str:
    """Return what an optimizer's state dict has that a checkpoint cannot represent; "" for nothing."""
    other_keys = sorted(map(_key_repr, set(value) - {"state", "param_groups"}))
    if other_keys:
        return f"has {other_keys[0]} beside state and groups"
    keys = {key for group in value["param_groups"] for key in group["params"] if isinstance(key, str)}
    other_state = [key for key in value["state"] if isinstance(key, str) and key not in keys and not key.isdecimal()]
    return (
        f"keeps state under {_key_repr(other_state[0])}, which is not a parameter" if other_state and not keys else ""
    )


def read_state_dict(value: dict[str, Any]) -> OptimizerStateDict:
    """Check a state dict. Raises NotOptimizerStateError with the reason."""
    saved_groups = value["param_groups"]
    count = sum(len(group["params"]) for group in saved_groups)
    if not 0 < count <= MAX_PARAMETERS or len(saved_groups) > MAX_PARAMETERS:
        raise NotOptimizerStateError(
            f"has {len(saved_groups)} groups with {count} parameters; from 1 to {MAX_PARAMETERS} are read"
        )
    groups = tuple(tuple(group["params"]) for group in saved_groups)
    optimizer = OptimizerStateDict(groups, tuple(map(_options, saved_groups)), value["state"])
    _check_keys(optimizer.keys)
    valid_keys = set(optimizer.keys)
    for key, slots in optimizer.state.items():
        if key not in valid_keys or type(key) not in (int, str):
            raise NotOptimizerStateError(f"has state of parameter {_key_repr(key)}, which is in none of its groups")
        if not isinstance(slots, dict) or not all(map(_is_name, slots)):
            raise NotOptimizerStateError(
                f"has state of parameter {_key_repr(key)} that is not a dict with names as keys"
            )
    return optimizer


def _options(group: dict[Any, Any]) -> dict[str, Any]:
    if invalid := [key for key in group if not _is_name(key)]:
        raise NotOptimizerStateError(f"has an option called {_key_repr(invalid[0])}")
    return {key: value for key, value in group.items() if key != "params"}


def _check_keys(keys: list[Any]) -> None:
    if not all(type(key) is str for key in keys):
        for key in keys:
            if type(key) is not int:
                raise NotOptimizerStateError(f"numbers a parameter {_key_repr(key)}")
            if not 0 <= key < MAX_PARAMETERS:
                raise NotOptimizerStateError(
                    f"numbers a parameter {_key_repr(key)}; numbers go from 0 to {MAX_PARAMETERS - 1}"
                )
    if len(set(keys)) != len(keys):
        raise NotOptimizerStateError("has a parameter twice in its groups")


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith("$")


def _key_repr(key: Any) -> str:
    return f"{key!r:.60}" if isinstance(key, str) else key_text(key)
