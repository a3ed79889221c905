"""Write a rank's events for its agent: one JSON object per line, each in a single write, so that lines never mix."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from workers.protocol.redaction import Redactor
from workers.protocol.reserved_files import is_full

RESERVED = frozenset({"t", "rank", "type"})
"""Keys of every event."""


REPORT_KEYS = frozenset({"step", "of"})
"""Keys of a report other than the user's metrics."""


class Events:
    """Append events to the attempt's events.jsonl. Without a file (tests, notebooks) they are only stored in
    `in_memory`.

    A full disk does not end training: reports are dropped, other events are written with the next one.
    """

    def __init__(self, path: Path | None, rank: int, redact: Redactor | None = None):
        self._path = path
        self._redact = redact or Redactor(())
        self._rank = rank
        self._pending: list[bytes] = []
        self._cut_off = False
        self.in_memory: list[dict[str, Any]] = []

    @property
    def folder(self) -> Path | None:
        """Folder of the attempt, None without a file."""
        return self._path.parent if self._path else None

    def write(self, kind: str, **fields: Any) -> bool:
        """Write an event. `kind` is report, checkpoint, phase or note. Returns False while the disk is full."""
        event = {"t": time.time(), "rank": self._rank, "type": kind, **self._clean(kind, fields)}
        if self._path is None:
            self.in_memory.append(event)
            return True
        line = json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        pending, self._pending = [*self._pending, line], []
        while pending and self._append(self._path, pending[0]):
            pending.pop(0)
        self._pending = [text for text in pending if text is not line or kind != "report"]
        return not pending

    def preempted(self) -> None:
        """Note that this rank stops early, as requested; on a full disk, exit with the code of SIGTERM instead."""
        if not self.write("note", preempted=True):
            sys.exit(128 + signal.SIGTERM)

    def _append(self, path: Path, line: bytes) -> bool:
        """Append a line. If the disk had space for only part of the previous one, start with a newline."""
        line = b"\n" + line if self._cut_off else line
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            written = os.write(descriptor, line)
        except OSError as e:
            if not is_full(e):
                raise
            return False
        finally:
            os.close(descriptor)
        self._cut_off = written < len(line)
        return not self._cut_off

    def _clean(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Remove secrets, except from our own fields: a secret such as "home" must not change a checkpoint's path."""
        if kind == "checkpoint":
            return fields
        names = {name: self._redact(name) if kind == "report" and name not in REPORT_KEYS else name for name in fields}
        return {names[name]: self._redact.clean_data(value) for name, value in fields.items()}
