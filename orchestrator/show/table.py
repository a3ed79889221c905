"""Tables as data: rich renders them in a terminal, `html` for a notebook. `grid` removes control characters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.terminal_text import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {
    "SUCCEEDED": "green", "RUNNING": "cyan", "STARTING": "cyan", "SAVING": "yellow", "RECOVERING": "yellow",
    "FAILED": "red", "CANCELLED": "dim", "ready": "green", "up": "green", "yes": "green", "fits": "green",
    "error": "red", "warning": "yellow", "broken": "red", "✓": "green", "✗": "dim", "recommended": "green",
}  # fmt: skip
RIGHT_ALIGNED = frozenset(
    {
        "BYTES",
        "TENSORS",
        "MEMORY",
        "FREE",
        "DEVICES",
        "NODES",
        "SIZE",
        "STEP",
        "PRICE/H",
        "PRICE/M ITEMS",
        "RATIO",
        "FORWARD",
        "TRAINING STEP",
        "ITEMS/S",
        "FORMS",
        "REGISTERS",
        "SPILLS",
        "SHARED KIB",
    }
)
UNWRAPPED = frozenset({"JOB", "CHECKPOINT"})
"""Columns that people copy from: a narrow terminal wraps the others instead."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of texts. `empty` is printed instead of a table without rows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    empty: str = "nothing"

    def __rich__(self) -> "RenderableType":
        from rich.table import Table
        from rich.text import Text

        if not self.rows:
            return Text(self.empty, style="dim")
        table = Table(
            box=None,
            pad_edge=False,
            header_style="bold",
            show_header=any(self.columns),
            title=self.title or None,
            title_justify="left",
        )
        for name in self.columns:
            is_right, is_unwrapped = name in RIGHT_ALIGNED, name in UNWRAPPED
            table.add_column(name, justify="right" if is_right else "left", overflow="fold", no_wrap=is_unwrapped)
        for row in self.rows:
            table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        return table

    def html(self) -> str:
        """Render a `<table>` without scripts or styles; all texts are escaped."""
        if not self.rows:
            return f"<em>{escape(self.empty)}</em>"
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        head = "" if not any(self.columns) else "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def grid(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "", empty: str = "nothing"
) -> TextTable:
    """Make a table from values of any type: None becomes empty, control characters are escaped."""
    cells = (tuple("" if cell is None else one_line(_value(cell)) for cell in row) for row in rows)
    return TextTable(tuple(columns), tuple(cells), one_line(title), empty)


def text(renderable: "Renderable", columns: int) -> str:
    """Render as text for a terminal of `columns` characters, without colours."""
    import io

    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=columns, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


class Renderable(Protocol):
    """Anything that renders in a terminal and in a notebook."""

    def __rich__(self) -> "RenderableType": ...

    def html(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TableStack:
    """Tables and lines, one below the other."""

    parts: tuple[Renderable | str, ...]

    def __rich__(self) -> "RenderableType":
        from rich.console import Group
        from rich.text import Text

        return Group(*(Text(part) if isinstance(part, str) else part for part in self.parts))

    def html(self) -> str:
        return "".join(f"<pre>{escape(part)}</pre>" if isinstance(part, str) else part.html() for part in self.parts)


def facts(data: dict[str, Any]) -> TextTable:
    """Table of names and values, one pair per line; unknown values are left out."""
    return grid(
        ("", ""),
        ((name.replace("_", " "), _value(value)) for name, value in data.items() if value not in (None, "", [], {})),
    )


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_value(inner)}" for name, inner in value.items() if inner != "")
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
