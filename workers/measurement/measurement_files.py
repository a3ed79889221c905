"""Files of JSON lines in POLYFLEET_HOME/measured, newest last; several processes may append at once."""

import json
import os
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.paths import home, private_dir

MAX_FILE_BYTES = 1 << 20


def path(name: str) -> Path:
    return home() / "measured" / f"{name}.jsonl"


def add(name: str, line: dict[str, Any]) -> bool:
    """Append a line, in one write. Returns False, without an error, if the disk is full or not writable."""
    try:
        private_dir(path(name).parent)
        with path(name).open("a") as file:
            file.write(json.dumps(line) + "\n")
        if path(name).stat().st_size > MAX_FILE_BYTES:
            _drop_older_half(path(name))
    except (OSError, UserError):
        return False
    return True


def lines(name: str) -> list[dict[str, Any]]:
    """Read all lines, oldest first. A line that a crash cut short is skipped."""
    values = []
    try:
        text = path(name).read_text(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            values.append(value)
    return values


def _drop_older_half(file: Path) -> None:
    all_lines = file.read_text(errors="replace").splitlines(keepends=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text("".join(all_lines[len(all_lines) // 2 :]))
    temporary.replace(file)
