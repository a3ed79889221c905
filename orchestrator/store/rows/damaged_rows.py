"""Record and skip rows that cannot be read, e.g. after a disk error or a change by another program or by hand."""

import logging
import math
import threading
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from orchestrator.core.model import Event
from orchestrator.store.rows.codec import decode

log = logging.getLogger(__name__)

MAX_ROWS = 1000
"""Rows that are recorded in detail; further ones are only counted."""


class DamagedDataError(ValueError):
    """Reason why a row is damaged."""


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """A row that cannot be read. `owner` is the job or benchmark run, `event` the event's name; "?" if unreadable."""

    table: str
    seq: int
    owner: str
    event: str
    reason: str

    def __str__(self) -> str:
        return f"row {self.seq} of table {self.table} ({self.event} of {self.owner}) {self.reason}"


class DamageList:
    """Damaged rows since the start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, int], DamagedRow] = {}
        self.count = 0

    @property
    def rows(self) -> list[DamagedRow]:
        with self._lock:
            return list(self._rows.values())

    def add(self, row: DamagedRow) -> None:
        with self._lock:
            if (row.table, row.seq) in self._rows:
                return
            self.count += 1
            if self.count > MAX_ROWS:
                return
            self._rows[row.table, row.seq] = row
        log.error("the job store is damaged: %s", row)


def event_of(row: Row[Any]) -> Event:
    """Event of a row. Raises DamagedDataError, since a database without strict types returns any value written."""
    if type(row.epoch) is not int or row.epoch < 0:
        raise DamagedDataError("has an epoch that is not a number")
    if not isinstance(row.time, int | float) or not math.isfinite(row.time):
        raise DamagedDataError("has a time that is not a number")
    return Event(
        _readable_text(row.job, "job"),
        _readable_text(row.event, "event"),
        row.epoch,
        row.time,
        data_of(row.data),
        row.seq,
    )


def data_of(text: Any) -> dict[str, Any]:
    """Decode a column that must contain a JSON object. Raises DamagedDataError."""
    if not isinstance(text, str):
        raise DamagedDataError("has data that is not text")
    try:
        data = decode(text)
    except (ValueError, RecursionError) as e:
        raise DamagedDataError(f"has data that is not JSON: {e}") from None
    if not isinstance(data, dict):
        raise DamagedDataError("has data that is not a JSON object")
    return data


def text_or_unknown(text: Any) -> str:
    return text if isinstance(text, str) else "?"


def _readable_text(text: Any, column: str) -> str:
    if not isinstance(text, str) or not text:
        raise DamagedDataError(f"has no readable {column}")
    return text
