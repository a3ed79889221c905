"""Lines of benchmark runs in format 2, read from either format: docs/benchmark-format.md."""

from typing import Any

FORMAT = 2
OLD_LINES = {"started": "begun", "targets": "columns", "target": "column", "result": "cell"}
"""Names of lines in format 1, by those in format 2. The other lines of format 1 are `lost`, `case` and `ended`."""
KEYS = {
    "columns": "targets",
    "column": "target",
    "blocks_again": "control_blocks",
    "alone_s": "single_call_s",
    "odd": "non_finite",
    "package": "code_archive",
}
LINES = {old: new for new, old in OLD_LINES.items()}
NESTED = ("columns", "blocks", "blocks_again", "accuracy")


def in_current_format(line: dict[str, Any]) -> dict[str, Any]:
    """`line` with the names of format 2; a line of format 2 is returned as it is."""
    if line["line"] not in LINES and "column" not in line:
        return line
    return _renamed(line) | {"line": LINES.get(line["line"], line["line"])}


def _renamed(data: dict[str, Any]) -> dict[str, Any]:
    return {KEYS.get(key, key): _inside(value) if key in NESTED else value for key, value in data.items()}


def _inside(value: Any) -> Any:
    if isinstance(value, list):
        return [_renamed(item) if isinstance(item, dict) else item for item in value]
    return _renamed(value) if isinstance(value, dict) else value
