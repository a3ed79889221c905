"""Read rows of users' CSV files. Errors name the file, the row and the field."""

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import UserError, nearest
from orchestrator.simulation.fields import read_text

RATE = "_steps_per_s"
MAX_FILE_BYTES = 256 << 20
MAX_DIGITS = 15


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a CSV file. `number`: line number in the file; `texts`: text by column."""

    file: str
    number: int
    texts: dict[str, str]

    def text(self, field: str) -> str:
        return self.texts[field].strip()

    def error(self, field: str, message: str, remedy: str) -> UserError:
        return UserError(f"{self.file}, row {self.number}, {field}: {message}", remedy)

    def number_of(
        self, field: str, *, above_zero: bool = False, blank: float = math.nan, most: float = math.inf
    ) -> float:
        """A finite number of at least 0. An empty value is `blank`, by default an error."""
        text = self.text(field)
        value = _float(text) if text else blank
        if value > most:
            raise self.error(field, f"{text!r} is more than {most:g}", f"the nearest valid is {most:g}")
        if math.isfinite(value) and (value > 0 or (value == 0 and not above_zero)):
            return value
        valid = "a number above 0" if above_zero else "a number of 0 or more"
        suggestion = f"; did you mean {-value:g}?" if math.isfinite(value) and value < 0 else ""
        raise self.error(field, f"{text!r} is not {valid}", f"write {valid}{suggestion}")

    def integer(self, field: str, minimum: int) -> int:
        text = self.text(field)
        value = _float(text)
        if value >= minimum and value.is_integer() and len(text) <= MAX_DIGITS:
            return int(value)
        nearest_valid = max(minimum, round(value)) if abs(value) < 10**MAX_DIGITS else minimum
        raise self.error(
            field, f"{text!r} is not an integer of {minimum} or more", f"the nearest valid is {nearest_valid}"
        )


def rows(path: Path, columns: tuple[str, ...], kinds: tuple[str, ...] = ()) -> Iterator[Row]:
    """Read a CSV file that has these columns and a rate column for each kind.

    Raises UserError if it has no row.
    """
    reader = csv.reader(io.StringIO(read_text(path, "CSV", MAX_FILE_BYTES), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        _check_header(path, header, columns, kinds)
        count = 0
        for texts in reader:
            if not texts:
                continue
            if len(texts) != len(header):
                message = f"{path.name}, row {reader.line_num}: {len(texts)} fields, the header has {len(header)}"
                raise UserError(message, "write one value for each column")
            count += 1
            yield Row(path.name, reader.line_num, dict(zip(header, texts, strict=True)))
    except csv.Error as e:
        raise UserError(f"{path.name}, row {reader.line_num}: not CSV: {e}", "write comma-separated values") from None
    if not count:
        raise UserError(f"{path.name}: no row after the header", "name a file with at least one row")


def _check_header(path: Path, header: list[str], columns: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    for name in columns:
        if name not in header:
            raise UserError(f"{path.name}, row 1: no column {name!r}", f"its columns: {', '.join(header) or 'none'}")
    measured = [name.removesuffix(RATE) for name in header if name.endswith(RATE)]
    for kind in kinds:
        if kind not in measured:
            raise UserError(f"--fleet: {path.name} has no column '{kind}{RATE}'", nearest(kind, measured))
    repeated = [name for name in header if header.count(name) > 1]
    if repeated:
        raise UserError(f"{path.name}, row 1: column {repeated[0]!r} appears twice", "remove one of the two")


def _float(text: str) -> float:
    """Convert to float; NaN if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
