"""Checkpoints and what happens to them on the way to another pool."""

from collections.abc import Iterator
from typing import Any

from orchestrator.show.grid import Grid, Stack, facts, grid
from orchestrator.show.units import size

Data = dict[str, Any]


def checkpoints(rows: list[Data]) -> Grid:
    """One line per checkpoint."""
    return grid(
        ("CHECKPOINT", "STEP", "SIZE", "KIND", "SAVED"),
        ((f"{c['pool']}:{c['path']}", c["step"], size(c["bytes"]), c["producer"]["kind"], c["created"]) for c in rows),
        empty="no checkpoints",
    )


def report(data: Data) -> Stack:
    """A report's plain values, then each of its parts under its name."""
    return Stack(tuple(_parts(data, "")))


def _parts(data: Data, title: str) -> Iterator[Grid | str]:
    flat = {key: value for key, value in data.items() if not _is_rows(value) and not isinstance(value, dict)}
    if title:
        yield from ("", title)
    if flat:
        yield facts({key: size(value) if key == "bytes" else value for key, value in flat.items()})
    for key, value in data.items():
        name = f"{title} {key}".replace("_", " ").strip()
        if isinstance(value, dict) and value:
            yield from _parts(value, name)
        elif _is_rows(value):
            columns = tuple(dict.fromkeys(column for row in value for column in row))
            yield from ("", name, grid([c.upper() for c in columns], ([row.get(c) for c in columns] for row in value)))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)
