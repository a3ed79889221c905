"""Read the fields of a message strictly: types, bounds, and no unknown fields. Standard library only."""

import math
from collections.abc import Collection
from typing import Any, TypeGuard

from cluster.input.untrusted_files import MAX_INTEGER

MAX_TEXT_LENGTH = 64 << 10
MAX_COUNT = 2**53
"""Largest integer that is exact in JavaScript; far below the limits of the store."""
_REQUIRED = object()


class InvalidMessage(ValueError):
    """Data that is not a valid message. Its text continues a sentence that starts with the message's name:
    "the outcome has no …".
    """


class Fields:
    """Reads fields of `data`, which may contain fields of `names` only.

    Every method takes a field's name and raises InvalidMessage; for a missing field it returns `default`, if passed.
    """

    def __init__(self, data: Any, names: Collection[str]):
        if not isinstance(data, dict):
            raise InvalidMessage("is not a JSON object")
        if unknown := [name for name in data if name not in names]:
            raise InvalidMessage(f"has the unknown field {str(unknown[0])[:40]!r}")
        self._data = data

    def _get(self, name: str, default: Any) -> Any:
        value = self._data.get(name, default)
        if value is _REQUIRED:
            raise InvalidMessage(f"has no `{name}`")
        return value

    def text(self, name: str, default: Any = _REQUIRED, *, maximum: int = MAX_TEXT_LENGTH, minimum: int = 0) -> str:
        value = self._get(name, default)
        if not is_text(value) or not minimum <= len(value) <= maximum:
            raise InvalidMessage(f"has a `{name}` that is not text of {minimum} to {maximum} characters")
        return value

    def choice(self, name: str, choices: Collection[str], default: Any = _REQUIRED) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise InvalidMessage(f"has the {name} {str(value)[:40]!r}, which is none of {', '.join(choices)}")
        return value

    def count(self, name: str, default: Any = _REQUIRED, *, minimum: int = 0, maximum: int = MAX_COUNT) -> int:
        value = self._get(name, default)
        if not is_count(value, minimum, maximum):
            raise InvalidMessage(f"has no `{name}` that is an integer from {minimum} to {maximum}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
        value = self._get(name, default)
        if not is_number(value) or not minimum <= value <= maximum:
            raise InvalidMessage(
                f"has no `{name}` that is a finite number{f' from {minimum:g} to {maximum:g}' * (maximum < math.inf)}"
            )
        return value

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise InvalidMessage(f"has no `{name}` that is true or false")
        return value

    def sequence(self, name: str, default: Any = _REQUIRED) -> tuple[Any, ...]:
        value = self._get(name, default)
        if not isinstance(value, list | tuple):
            raise InvalidMessage(f"has no `{name}` that is a list")
        return tuple(value)

    def object(self, name: str, default: Any = _REQUIRED) -> dict[str, Any]:
        value = self._get(name, default)
        if not isinstance(value, dict) or not all(is_text(key) for key in value):
            raise InvalidMessage(f"has no `{name}` that is an object")
        return value

    def texts(self, name: str, default: Any = _REQUIRED) -> dict[str, str]:
        """An object whose values are text."""
        value = self.object(name, default)
        if not all(is_text(text) for text in value.values()):
            raise InvalidMessage(f"has a value in `{name}` that is not text")
        return value

    def optional(self, name: str) -> Any:
        return self._data.get(name)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is a finite number, and not a boolean."""
    if type(value) is int:
        return abs(value) <= MAX_INTEGER
    return type(value) is float and math.isfinite(value)


def is_count(value: Any, minimum: int = 0, maximum: int = MAX_COUNT) -> TypeGuard[int]:
    return type(value) is int and minimum <= value <= maximum


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a value is text that UTF-8 can encode."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
