"""What a rank tells its agent: one JSON object per line, each appended by a single write, so that ranks never mix."""

import json
import os
import time
from pathlib import Path
from typing import Any

from workers.attempt.redaction import Redactor

RESERVED = frozenset({"t", "rank", "type"})
"""Keys every event has."""


class Events:
    """Appends to the attempt's events.jsonl. Without a file (tests, notebooks) the events are only kept, in `kept`."""

    def __init__(self, path: Path | None, rank: int, redact: Redactor | None = None):
        self._path = path
        self._redact = redact or Redactor(())
        self._rank = rank
        self.kept: list[dict[str, Any]] = []

    @property
    def folder(self) -> Path | None:
        """The attempt's."""
        return self._path.parent if self._path else None

    def write(self, kind: str, **fields: Any) -> None:
        """`kind` is report, checkpoint, phase or note; `fields` is plain data."""
        event = {"t": time.time(), "rank": self._rank, "type": kind, **self._clean(kind, fields)}
        if self._path is None:
            self.kept.append(event)
            return
        line = json.dumps(event, allow_nan=False, separators=(",", ":")) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def _clean(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Without secrets. What we say ourselves stays: a secret such as "home" costs no checkpoint."""
        if kind == "checkpoint":
            return fields
        names = {name: self._redact(name) if kind == "report" and name != "step" else name for name in fields}
        return {names[name]: self._redact.plain(value) for name, value in fields.items()}
