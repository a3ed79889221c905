"""Lists and dicts that display as tables: printed, by rich, and as HTML in a notebook."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from orchestrator.show.table import TableStack, TextTable, grid, text

Draw = Callable[[Any], TextTable | TableStack]
MAX_LINES = 60
"""Maximum lines of a printed table; the data is complete."""


def _printed(table: TextTable | TableStack) -> str:
    """Render a table at the terminal's width, cut to `MAX_LINES`."""
    lines = text(table, shutil.get_terminal_size().columns).split("\n")
    hidden = len(lines) - MAX_LINES
    return "\n".join([*lines[:MAX_LINES], *([f"… and {hidden} more lines"] if hidden > 0 else [])])


class TableView(list[dict[str, Any]]):
    """A list of rows. `draw` makes the table."""

    def __init__(self, rows: Iterable[Any], draw: Draw):
        super().__init__(rows)
        self._draw = draw

    def __rich__(self) -> TextTable | TableStack:
        return self._draw(self)

    def __repr__(self) -> str:
        return _printed(self._draw(self))

    def _repr_html_(self) -> str:
        return self._draw(self).html()


class KeyValueView(dict[str, Any]):
    """A mapping. `draw` makes the table."""

    def __init__(self, data: Mapping[str, Any], draw: Draw):
        super().__init__(data)
        self._draw = draw

    def __rich__(self) -> TextTable | TableStack:
        return self._draw(self)

    def __repr__(self) -> str:
        return _printed(self._draw(self))

    def _repr_html_(self) -> str:
        return self._draw(self).html()


def schema_fields(schema: dict[str, Any]) -> TextTable:
    """The fields of a JSON Schema: name, type, and what the field is for."""
    fields = schema["properties"].items()
    rows = ((name, _schema_type(field), " ".join(field.get("description", "").split())) for name, field in fields)
    return grid(("FIELD", "TYPE", "DESCRIPTION"), rows)


def _schema_type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(map(_schema_type, field["anyOf"]))
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    return str(field.get("type") or field.get("$ref", "any").rpartition("/")[2])
