"""What a rank tells its agent: one JSON object per line, each appended by a single write, so that ranks never mix."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from workers.attempt.redaction import Redactor
from workers.attempt.reserved_files import is_full

RESERVED = frozenset({"t", "rank", "type"})
"""Keys every event has."""


OURS = frozenset({"step", "of"})
"""Of a report, beside the user's metrics."""


class Events:
    """Appends to the attempt's events.jsonl. Without a file (tests, notebooks) the events are only kept, in `kept`.

    A full disk ends no training: reports are lost, other events are written with the next one.
    """

    def __init__(self, path: Path | None, rank: int, redact: Redactor | None = None):
        self._path = path
        self._redact = redact or Redactor(())
        self._rank = rank
        self._late: list[bytes] = []
        self._cut_off = False
        self.kept: list[dict[str, Any]] = []

    @property
    def folder(self) -> Path | None:
        """The attempt's."""
        return self._path.parent if self._path else None

    def write(self, kind: str, **fields: Any) -> bool:
        """`kind` is report, checkpoint, phase or note; `fields` is plain data. False while the disk is full."""
        event = {"t": time.time(), "rank": self._rank, "type": kind, **self._clean(kind, fields)}
        if self._path is None:
            self.kept.append(event)
            return True
        line = json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        todo, self._late = [*self._late, line], []
        while todo and self._append(self._path, todo[0]):
            todo.pop(0)
        self._late = [text for text in todo if text is not line or kind != "report"]
        return not todo

    def preempted(self) -> None:
        """Tell that this rank stops early because it was asked to; on a full disk its exit code says so."""
        if not self.write("note", preempted=True):
            sys.exit(128 + signal.SIGTERM)

    def _append(self, path: Path, line: bytes) -> bool:
        """A line that the disk had space for only half of is ended before the next one."""
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
        """Without secrets. What we say ourselves stays: a secret such as "home" costs no checkpoint."""
        if kind == "checkpoint":
            return fields
        names = {name: self._redact(name) if kind == "report" and name not in OURS else name for name in fields}
        return {names[name]: self._redact.plain(value) for name, value in fields.items()}
