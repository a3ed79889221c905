"""Mappings of YAML files that people write, read key by key: what is wrong is told with its file and its field."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster import strict_yaml
from cluster.errors import UserError, nearest
from orchestrator.simulate.text_files import text_of


class Fields:
    """`path` is the dotted one of this mapping in its file, "" for the whole file."""

    def __init__(self, file: str, path: str, data: Any, known: tuple[str, ...] | None):
        """`known` keys; None: names of anything. Raises UserError for another key, or where there is no mapping."""
        self.file, self.path = file, path
        if not isinstance(data, dict):
            raise UserError(f"{self._place()}: {data!r:.60} is not a mapping", "write `key: value`")
        self.data: dict[str, Any] = data
        for key in data:
            if known is not None and key not in known:
                raise UserError(f"{self._place(key)}: unknown key", nearest(key, known))

    @classmethod
    def of_file(cls, path: Path, known: tuple[str, ...]) -> "Fields":
        return cls(path.name, "", strict_yaml.load(text_of(path, "YAML", strict_yaml.MAX_BYTES), path.name), known)

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def wrong(self, key: str, message: str, remedy: str) -> UserError:
        return UserError(f"{self._place(key)}: {message}", remedy)

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """From `least` to `most`; without a default it has to be there."""
        value = self._value(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if is_number and least <= value <= most:
            return float(value)
        close = (least if value < least else most) if is_number else least
        message = f"{value!r:.60} is not a number from {least:g} to {most:g}"
        raise self.wrong(key, message, f"the nearest valid is {close:g}")

    def whole(self, key: str, least: int, most: int, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if is_whole and least <= value <= most:
            return int(value)
        close = most if isinstance(value, int | float) and value > most else least
        message = f"{value!r:.60} is not a whole number from {least} to {most}"
        raise self.wrong(key, message, f"the nearest valid is {close}")

    def inner(self, key: str, known: tuple[str, ...] | None) -> "Fields":
        return Fields(self.file, self._dotted(key), self._value(key, None), known)

    def inners(self, key: str, known: tuple[str, ...] | None) -> "Iterator[tuple[str, Fields]]":
        """Of a mapping of mappings."""
        names = self.inner(key, None)
        for name in names.data:
            yield name, names.inner(name, known)

    def items(self, key: str, known: tuple[str, ...]) -> "Iterator[Fields]":
        """Of a list of mappings, which need not be there."""
        found = self.data.get(key, [])
        if not isinstance(found, list):
            raise self.wrong(key, f"{found!r:.60} is not a list", "write each in a line of its own, after `- `")
        for number, item in enumerate(found):
            yield Fields(self.file, self._dotted(f"{key}[{number}]"), item, known)

    def _value(self, key: str, default: Any) -> Any:
        if key not in self.data and default is None:
            raise self.wrong(key, "missing", f"write `{key}: ...`")
        return self.data.get(key, default)

    def _dotted(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _place(self, key: str = "") -> str:
        return ", ".join(filter(None, (self.file, self._dotted(key) if key else self.path)))
