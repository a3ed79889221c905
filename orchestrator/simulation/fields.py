"""Read users' text files up to a size, and mappings in YAML files key by key. Errors name the file and the field."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.errors import UserError, nearest
from cluster.input import strict_yaml


class YamlFields:
    """A mapping in a file. `path`: its dotted path, "" for the file's top level."""

    def __init__(self, file: str, path: str, data: Any, valid_keys: tuple[str, ...] | None):
        """`valid_keys`: None for any. Raises UserError for another key, or if `data` is not a mapping."""
        self.file, self.path = file, path
        if not isinstance(data, dict):
            raise UserError(f"{self._location()}: {data!r:.60} is not a mapping", "write `key: value`")
        self.data: dict[str, Any] = data
        for key in data:
            if valid_keys is not None and key not in valid_keys:
                raise UserError(f"{self._location(key)}: unknown key", nearest(key, valid_keys))

    @classmethod
    def of_file(cls, path: Path, valid_keys: tuple[str, ...]) -> "YamlFields":
        return cls(
            path.name, "", strict_yaml.load(read_text(path, "YAML", strict_yaml.MAX_BYTES), path.name), valid_keys
        )

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def error(self, key: str, message: str, remedy: str) -> UserError:
        return UserError(f"{self._location(key)}: {message}", remedy)

    def number(self, key: str, minimum: float, maximum: float, default: float | None = None) -> float:
        """A number from `minimum` to `maximum`; required if there is no default."""
        value = self._value(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if is_number and minimum <= value <= maximum:
            return float(value)
        nearest_valid = (minimum if value < minimum else maximum) if is_number else minimum
        message = f"{value!r:.60} is not a number from {minimum:g} to {maximum:g}"
        raise self.error(key, message, f"the nearest valid is {nearest_valid:g}")

    def integer(self, key: str, minimum: int, maximum: int, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if is_integer and minimum <= value <= maximum:
            return int(value)
        nearest_valid = maximum if isinstance(value, int | float) and value > maximum else minimum
        message = f"{value!r:.60} is not an integer from {minimum} to {maximum}"
        raise self.error(key, message, f"the nearest valid is {nearest_valid}")

    def mapping(self, key: str, valid_keys: tuple[str, ...] | None) -> "YamlFields":
        return YamlFields(self.file, self._dotted(key), self._value(key, None), valid_keys)

    def mappings(self, key: str, valid_keys: tuple[str, ...] | None) -> "Iterator[tuple[str, YamlFields]]":
        """Yield (name, mapping) of a mapping of mappings."""
        names = self.mapping(key, None)
        for name in names.data:
            yield name, names.mapping(name, valid_keys)

    def items(self, key: str, valid_keys: tuple[str, ...]) -> "Iterator[YamlFields]":
        """Yield the mappings in an optional list."""
        values = self.data.get(key, [])
        if not isinstance(values, list):
            raise self.error(key, f"{values!r:.60} is not a list", "write each item on a separate line, after `- `")
        for number, item in enumerate(values):
            yield YamlFields(self.file, self._dotted(f"{key}[{number}]"), item, valid_keys)

    def _value(self, key: str, default: Any) -> Any:
        if key not in self.data and default is None:
            raise self.error(key, "missing", f"write `{key}: ...`")
        return self.data.get(key, default)

    def _dotted(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _location(self, key: str = "") -> str:
        return ", ".join(filter(None, (self.file, self._dotted(key) if key else self.path)))


def read_text(path: Path, form: str, max_bytes: int) -> str:
    """Read a file.

    `form`: its format for messages, e.g. "CSV". Raises UserError if it cannot be read, is larger than `max_bytes`, or
    is not UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise UserError(f"{path} has more than {max_bytes >> 20} MiB", f"name a smaller {form} file")
        text = content.decode("utf-8-sig")
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}", f"name a {form} file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path.name} is not a {form} file: it is not text in UTF-8", f"name a {form} file") from None
    if "\0" in text:
        raise UserError(f"{path.name} is not a {form} file: it has NUL bytes", f"name a {form} file")
    return text
