"""State dicts of optimizers in files of others, told by their form: {"state": {number: slots}, "param_groups": […]}.

Source: torch.optim.Optimizer.state_dict; torch.distributed.checkpoint.state_dict writes names in place of the numbers.
"""

from dataclasses import dataclass
from typing import Any

from workers.checkpoint.format.message_text import key_text
from workers.checkpoint.format.optimizer_tree import SHAPED_LIKE_PARAMETER, Key

MOST = 1_000_000
"""Parameters, and groups: what a manifest has room for."""


class NotOptimizerStateError(ValueError):
    """It has the form of an optimizer's state dict, and says what none can say."""


@dataclass(frozen=True, slots=True)
class OptimizerStateDict:
    """An optimizer's state dict, found sound: every key is in one group, and all state belongs to one of them."""

    groups: tuple[tuple[Key, ...], ...]
    options: tuple[dict[str, Any], ...]
    state: dict[Key, dict[str, Any]]

    @property
    def keys(self) -> list[Key]:
        return [key for group in self.groups for key in group]

    @property
    def numbered(self) -> bool:
        return isinstance(self.keys[0], int)

    def in_numbers(self) -> "OptimizerStateDict":
        """With numbers in the order of the groups, as torch.optim itself gives them."""
        numbers: dict[Key, Key] = {key: number for number, key in enumerate(self.keys)}
        groups = tuple(tuple(numbers[key] for key in group) for group in self.groups)
        return OptimizerStateDict(groups, self.options, {numbers[key]: slots for key, slots in self.state.items()})

    def shape_of(self, key: Key) -> tuple[int, ...] | None:
        """The parameter's, as its state tells it; None where it does not."""
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
    """Those that a list or a dict holds, by index or key, where it holds nothing else: GANs and Lightning have them."""
    if isinstance(value, dict):
        items = {key: item for key, item in value.items() if isinstance(key, str)}
    else:
        items = {str(i): item for i, item in enumerate(value)} if isinstance(value, list) else {}
    return items if items and len(items) == len(value) and all(map(is_optimizer, items.values())) else {}


def not_portable_reason(value: dict[str, Any]) -> str:
    """What an optimizer's state dict holds beyond what a checkpoint has a place for; "" where that is nothing."""
    beside = sorted(map(_shown, set(value) - {"state", "param_groups"}))
    if beside:
        return f"has {beside[0]} beside state and groups"
    keys = {key for group in value["param_groups"] for key in group["params"] if isinstance(key, str)}
    apart = [key for key in value["state"] if isinstance(key, str) and key not in keys and not key.isdecimal()]
    return f"keeps state under {_shown(apart[0])}, which is no parameter" if apart and not keys else ""


def read_state_dict(value: dict[str, Any]) -> OptimizerStateDict:
    """Raises NotOptimizerStateError with what is wrong."""
    found = value["param_groups"]
    count = sum(len(group["params"]) for group in found)
    if not 0 < count <= MOST or len(found) > MOST:
        raise NotOptimizerStateError(f"has {len(found)} groups with {count} parameters; from 1 to {MOST} are read")
    groups = tuple(tuple(group["params"]) for group in found)
    told = OptimizerStateDict(groups, tuple(map(_options, found)), value["state"])
    _check_keys(told.keys)
    known = set(told.keys)
    for key, slots in told.state.items():
        if key not in known or type(key) not in (int, str):
            raise NotOptimizerStateError(f"has state of parameter {_shown(key)}, which is in none of its groups")
        if not isinstance(slots, dict) or not all(map(_is_word, slots)):
            raise NotOptimizerStateError(f"has state of parameter {_shown(key)} that is no dict of names")
    return told


def _options(group: dict[Any, Any]) -> dict[str, Any]:
    if wrong := [key for key in group if not _is_word(key)]:
        raise NotOptimizerStateError(f"has an option called {_shown(wrong[0])}")
    return {key: value for key, value in group.items() if key != "params"}


def _check_keys(keys: list[Any]) -> None:
    if not all(type(key) is str for key in keys):
        for key in keys:
            if type(key) is not int:
                raise NotOptimizerStateError(f"numbers a parameter {_shown(key)}")
            if not 0 <= key < MOST:
                raise NotOptimizerStateError(f"numbers a parameter {_shown(key)}; numbers go from 0 to {MOST - 1}")
    if len(set(keys)) != len(keys):
        raise NotOptimizerStateError("has a parameter twice in its groups")


def _is_word(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith("$")


def _shown(key: Any) -> str:
    return f"{key!r:.60}" if isinstance(key, str) else key_text(key)
