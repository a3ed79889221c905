"""Files of jobs: lists and results of transfers."""

from typing import Any

from orchestrator.show.table import TableStack, TextTable, facts, grid
from orchestrator.terminal_text import escape_control
from orchestrator.units import size, when

Data = dict[str, Any]


def files(data: Data) -> TableStack:
    return TableStack((_table(data["entries"]), *map(escape_control, data["notes"])))


def _table(entries: list[Data]) -> TextTable:
    rows = ((_name(entry), _size(entry), when(entry["modified_s"])) for entry in entries)
    return grid(("FILE", "SIZE", "CHANGED"), rows, empty="no files")


def _name(entry: Data) -> str:
    if entry["type"] == "link":
        return f"{entry['path']} -> {entry['target']}"
    return f"{entry['path']}/" if entry["type"] == "folder" else str(entry["path"])


def _size(entry: Data) -> str:
    return size(entry["bytes"]) if entry["type"] == "file" else ""


def transferred(data: Data) -> TableStack:
    count = len(data["files"])
    head = {
        "job": data["job"],
        "to": data["target"],
        "files": f"{count} of {size(data['bytes'])}, {size(data['transferred_bytes'])} transferred",
    }
    return TableStack((facts(head), *map(escape_control, data["notes"])))
