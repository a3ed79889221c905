"""Files of JSON lines in POLYFLEET_HOME/measured, newest last, to which several processes add at once."""

import json
import os
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.paths import home, private_dir

MOST_BYTES = 1 << 20


def path(name: str) -> Path:
    return home() / "measured" / f"{name}.jsonl"


def add(name: str, line: dict[str, Any]) -> bool:
    """One line, in one write. A full disk, or a home that cannot be written, costs the line and not the result:
    False.
    """
    try:
        private_dir(path(name).parent)
        with path(name).open("a") as file:
            file.write(json.dumps(line) + "\n")
        if path(name).stat().st_size > MOST_BYTES:
            _forget_older_half(path(name))
    except (OSError, UserError):
        return False
    return True


def lines(name: str) -> list[dict[str, Any]]:
    """Oldest first. A line that was cut short by a crash is passed over."""
    found = []
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
            found.append(value)
    return found


def _forget_older_half(file: Path) -> None:
    kept = file.read_text(errors="replace").splitlines(keepends=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text("".join(kept[len(kept) // 2 :]))
    part.replace(file)
