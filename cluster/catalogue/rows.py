"""Read rows of a catalogue's CSV file as frozen dataclasses.

The field's type decides how a value is parsed. A list inside a value is separated by "; ". An empty value is unknown.
An invalid value raises a UserError that names the distribution, the file, the line and the field.
"""

import csv
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from cluster.errors import UserError, nearest

OWN_DISTRIBUTION = "polyfleet"
Row = TypeVar("Row")
Column = tuple[str, Callable[[str], Any], bool]
"""Name, parser of its values, and whether a value is required."""
YES_NO = {"yes": True, "no": False}


@dataclass(frozen=True, slots=True)
class CatalogueFile:
    """A CSV file and the distribution it came with."""

    path: Path
    distribution: str = OWN_DISTRIBUTION

    def error(self, line: int, field: str, message: str, remedy: str = "") -> UserError:
        prefix = "" if self.distribution == OWN_DISTRIBUTION else f"distribution {self.distribution}: "
        return UserError(f"{prefix}{self.path.name}, line {line}, field {field!r}: {message}", remedy)

    def rows(self, cls: type[Row]) -> "list[tuple[int, Row]]":
        """Return (line, row) of each line. A missing column has its field's default."""
        with self.path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            columns = self._columns(next(lines, []), cls)
            return [(lines.line_num, self._row(cls, columns, texts, lines.line_num)) for texts in lines if texts]

    def _columns(self, header: list[str], cls: type) -> "list[Column]":
        valid = {f.name: f for f in fields(cls)}
        for name in header:
            if name not in valid:
                raise self.error(1, name, "there is no such column", nearest(name, list(valid)))
        for name, field in valid.items():
            if _required(field) and name not in header:
                raise self.error(1, name, "the column is missing", f"the columns are {', '.join(valid)}")
        return [(name, _reader(valid[name]), _required(valid[name])) for name in header]

    def _row(self, cls: type[Row], columns: "list[Column]", texts: list[str], line: int) -> Row:
        if len(texts) != len(columns):
            raise self.error(line, columns[min(len(texts), len(columns)) - 1][0],
                             f"the line has {len(texts)} fields, the header has {len(columns)}")  # fmt: skip
        values = {}
        for (name, reader, required), text in zip(columns, texts, strict=True):
            if text or required:
                try:
                    values[name] = reader(text.strip())
                except ValueError as e:
                    raise self.error(line, name, f"{text!r} {e}") from None
        return cls(**values)


def _required(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _reader(field: "Field[Any]") -> Callable[[str], Any]:
    annotation: Any = field.type
    if isinstance(annotation, types.UnionType):
        return {float: _number, int: _integer, bool: _yes_no}[annotation.__args__[0]]
    if annotation is str:
        return _required_text if _required(field) else str
    return _list if annotation == tuple[str, ...] else _integer


def _required_text(text: str) -> str:
    if not text:
        raise ValueError("is empty")
    return text


def _list(text: str) -> tuple[str, ...]:
    return tuple(_parts(text))


def _parts(text: str) -> Iterator[str]:
    return (part for part in (item.strip() for item in text.split(";")) if part)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if not 0 < number < float("inf"):
        raise ValueError("is not a number above 0")
    return number


def _integer(text: str) -> int:
    number = _number(text)
    if number != int(number):
        raise ValueError("is not an integer")
    return int(number)


def _yes_no(text: str) -> bool:
    if text not in YES_NO:
        raise ValueError("is neither yes nor no")
    return YES_NO[text]
