"""Reads the fields of a message strictly: types, bounds, and no field beside. Standard library only."""

import math
from collections.abc import Collection
from typing import Any, TypeGuard

from cluster.untrusted_files import LARGEST_INTEGER

LONGEST_TEXT = 64 << 10
LARGEST_COUNT = 2**53
"""What JavaScript counts exactly; far within what the store holds."""
_NONE = object()


class InvalidMessage(ValueError):
    """Data that is not the message it should be. Its text goes on after the message's name: "the outcome has no …"."""


class Fields:
    """Of `data`, which may hold those of `names` and no others. Every method takes a field's name and raises
    InvalidMessage; an absent field is its `default`, where there is one.
    """

    def __init__(self, data: Any, names: Collection[str]):
        if not isinstance(data, dict):
            raise InvalidMessage("is no JSON object")
        if strange := [name for name in data if name not in names]:
            raise InvalidMessage(f"has the field {str(strange[0])[:40]!r}, which it should not have")
        self._data = data

    def _get(self, name: str, default: Any) -> Any:
        value = self._data.get(name, default)
        if value is _NONE:
            raise InvalidMessage(f"has no `{name}`")
        return value

    def text(self, name: str, default: Any = _NONE, *, most: int = LONGEST_TEXT, least: int = 0) -> str:
        value = self._get(name, default)
        if not is_text(value) or not least <= len(value) <= most:
            raise InvalidMessage(f"has a `{name}` that is not text of {least} to {most} characters")
        return value

    def word(self, name: str, words: Collection[str], default: Any = _NONE) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or value not in words:
            raise InvalidMessage(f"has the {name} {str(value)[:40]!r}, which is none of {', '.join(words)}")
        return value

    def count(self, name: str, default: Any = _NONE, *, least: int = 0, most: int = LARGEST_COUNT) -> int:
        value = self._get(name, default)
        if not is_count(value, least, most):
            raise InvalidMessage(f"has no `{name}` that is a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: Any = _NONE, *, least: float = 0.0, most: float = math.inf) -> float:
        value = self._get(name, default)
        if not is_number(value) or not least <= value <= most:
            raise InvalidMessage(
                f"has no `{name}` that is a finite number{f' from {least:g} to {most:g}' * (most < math.inf)}"
            )
        return value

    def flag(self, name: str, default: Any = _NONE) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise InvalidMessage(f"has no `{name}` that is true or false")
        return value

    def sequence(self, name: str, default: Any = _NONE) -> tuple[Any, ...]:
        value = self._get(name, default)
        if not isinstance(value, list | tuple):
            raise InvalidMessage(f"has no `{name}` that is a list")
        return tuple(value)

    def object(self, name: str, default: Any = _NONE) -> dict[str, Any]:
        value = self._get(name, default)
        if not isinstance(value, dict) or not all(is_text(key) for key in value):
            raise InvalidMessage(f"has no `{name}` that is an object")
        return value

    def texts(self, name: str, default: Any = _NONE) -> dict[str, str]:
        """An object whose values are text."""
        value = self.object(name, default)
        if not all(is_text(text) for text in value.values()):
            raise InvalidMessage(f"has a value in `{name}` that is not text")
        return value

    def optional(self, name: str) -> Any:
        return self._data.get(name)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Finite, and no boolean."""
    if type(value) is int:
        return abs(value) <= LARGEST_INTEGER
    return type(value) is float and math.isfinite(value)


def is_count(value: Any, least: int = 0, most: int = LARGEST_COUNT) -> TypeGuard[int]:
    return type(value) is int and least <= value <= most


def is_text(value: Any) -> TypeGuard[str]:
    """Text that UTF-8 can hold."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
