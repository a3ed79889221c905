"""Answers: plain lists and dicts that show themselves as tables, by rich in a terminal and as HTML in a notebook."""

from collections.abc import Callable
from typing import Any

from orchestrator.show.grid import Grid, Stack

Draw = Callable[[Any], Grid | Stack]


class Rows(list[dict[str, Any]]):
    """A list of rows. `draw` makes the table of them."""

    def __init__(self, rows: list[dict[str, Any]], draw: Draw):
        super().__init__(rows)
        self._draw = draw

    def __rich__(self) -> Grid | Stack:
        return self._draw(self)

    def _repr_html_(self) -> str:
        return self._draw(self).html()


class Facts(dict[str, Any]):
    """A mapping. `draw` makes the table of it."""

    def __init__(self, data: dict[str, Any], draw: Draw):
        super().__init__(data)
        self._draw = draw

    def __rich__(self) -> Grid | Stack:
        return self._draw(self)

    def _repr_html_(self) -> str:
        return self._draw(self).html()
