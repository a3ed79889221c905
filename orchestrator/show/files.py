"""Files of jobs, listed and on their way."""

from typing import Any

from orchestrator.show.table import Grid, Stack, facts, grid
from orchestrator.show.terminal_text import visible
from orchestrator.show.units import size, when

Data = dict[str, Any]


def files(data: Data) -> Stack:
    return Stack((_table(data["entries"]), *map(visible, data["notes"])))


def _table(entries: list[Data]) -> Grid:
    rows = ((_name(entry), _size(entry), when(entry["modified_s"])) for entry in entries)
    return grid(("FILE", "SIZE", "CHANGED"), rows, empty="no files")


def _name(entry: Data) -> str:
    if entry["type"] == "link":
        return f"{entry['path']} -> {entry['target']}"
    return f"{entry['path']}/" if entry["type"] == "folder" else str(entry["path"])


def _size(entry: Data) -> str:
    return size(entry["bytes"]) if entry["type"] == "file" else ""


def transferred(data: Data) -> Stack:
    count = len(data["files"])
    head = {
        "job": data["job"],
        "to": data["target"],
        "files": f"{count} of {size(data['bytes'])}, {size(data['travelled_bytes'])} travelled",
    }
    return Stack((facts(head), *map(visible, data["notes"])))
