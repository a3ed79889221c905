"""Read rows of a catalogue's CSV file as frozen dataclasses.

The field's type decides how a cell is parsed. A list inside a cell is separated by "; ". An empty cell is unknown. An
invalid cell raises a UserError that names the distribution, the file, the line and the field.
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
            return [(lines.line_num, self._row(cls, columns, cells, lines.line_num)) for cells in lines if cells]

    def _columns(self, header: list[str], cls: type) -> "list[Column]":
        valid = {f.name: f for f in fields(cls)}
        for name in header:
            if name not in valid:
                raise self.error(1, name, "there is no such column", nearest(name, list(valid)))
        for name, field in valid.items():
            if _required(field) and name not in header:
                raise self.error(1, name, "the column is missing", f"the columns are {', '.join(valid)}")
        return [(name, _reader(valid[name]), _required(valid[name])) for name in header]

    def _row(self, cls: type[Row], columns: "list[Column]", cells: list[str], line: int) -> Row:
        if len(cells) != len(columns):
            raise self.error(line, columns[min(len(cells), len(columns)) - 1][0],
                             f"the line has {len(cells)} cells, the header has {len(columns)}")  # fmt: skip
        values = {}
        for (name, reader, required), cell in zip(columns, cells, strict=True):
            if cell or required:
                try:
                    values[name] = reader(cell.strip())
                except ValueError as e:
                    raise self.error(line, name, f"{cell!r} {e}") from None
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


def _required_text(cell: str) -> str:
    if not cell:
        raise ValueError("is empty")
    return cell


def _list(cell: str) -> tuple[str, ...]:
    return tuple(_parts(cell))


def _parts(cell: str) -> Iterator[str]:
    return (part for part in (word.strip() for word in cell.split(";")) if part)


def _number(cell: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        raise ValueError("is not a number") from None
    if not 0 < number < float("inf"):
        raise ValueError("is not a number above 0")
    return number


def _integer(cell: str) -> int:
    number = _number(cell)
    if number != int(number):
        raise ValueError("is not an integer")
    return int(number)


def _yes_no(cell: str) -> bool:
    if cell not in YES_NO:
        raise ValueError("is neither yes nor no")
    return YES_NO[cell]
