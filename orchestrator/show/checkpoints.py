"""Checkpoints and what happens to them on the way to another pool."""

from typing import Any

from orchestrator.show.grid import Grid, Stack, facts, grid
from orchestrator.show.units import size

Data = dict[str, Any]


def checkpoints(rows: list[Data]) -> Grid:
    columns = ("CHECKPOINT", "STEP", "SIZE", "KIND")
    return grid(
        columns,
        ((f"{c['pool']}:{c['path']}", c["step"], size(c.get("bytes")), c.get("kind")) for c in rows),
        empty="no checkpoints",
    )


def report(data: Data) -> Stack:
    """A report's plain values, then each of its lists and tables."""
    flat = {key: value for key, value in data.items() if not _is_rows(value) and not isinstance(value, dict)}
    parts: list[Grid | str] = [facts(flat)]
    for key, value in data.items():
        if isinstance(value, dict) and value:
            parts += ["", key.replace("_", " "), facts(value)]
        elif _is_rows(value) and value:
            columns = tuple(dict.fromkeys(name for row in value for name in row))
            parts += [
                "",
                key.replace("_", " "),
                grid([c.upper() for c in columns], ([row.get(c) for c in columns] for row in value)),
            ]
    return Stack(tuple(parts))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)
