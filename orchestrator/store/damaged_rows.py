"""Rows that cannot be read: a bad disk, another program, a person with an SQL prompt. They are named and left out."""

import logging
import math
import threading
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from orchestrator.core.model import Event
from orchestrator.store.codec import decode

log = logging.getLogger(__name__)

MOST = 1000
"""Of more, only the number is kept."""


class DamagedDataError(ValueError):
    """The reason why a row is."""


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """`owner` is the job or benchmark run, `event` the word of an event; "?" where that cannot be read."""

    table: str
    seq: int
    owner: str
    event: str
    why: str

    def __str__(self) -> str:
        return f"row {self.seq} of table {self.table} ({self.event} of {self.owner}) {self.why}"


class DamageList:
    """What was found since the start. Safe to use from many threads."""

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
            if self.count > MOST:
                return
            self._rows[row.table, row.seq] = row
        log.error("the job store is damaged: %s", row)


def event_of(row: Row[Any]) -> Event:
    """Raises DamagedDataError. A database without strict types returns whatever was written."""
    if type(row.epoch) is not int or row.epoch < 0:
        raise DamagedDataError("has an epoch that is not a number")
    if not isinstance(row.time, int | float) or not math.isfinite(row.time):
        raise DamagedDataError("has a time that is not a number")
    return Event(_word(row.job, "job"), _word(row.event, "event"), row.epoch, row.time, data_of(row.data), row.seq)


def data_of(text: Any) -> dict[str, Any]:
    """Raises DamagedDataError for what is not one JSON object."""
    if not isinstance(text, str):
        raise DamagedDataError("has data that is not text")
    try:
        data = decode(text)
    except (ValueError, RecursionError) as e:
        raise DamagedDataError(f"has data that is not JSON: {e}") from None
    if not isinstance(data, dict):
        raise DamagedDataError("has data that is not a JSON object")
    return data


def readable(text: Any) -> str:
    return text if isinstance(text, str) else "?"


def _word(text: Any, what: str) -> str:
    if not isinstance(text, str) or not text:
        raise DamagedDataError(f"has no readable {what}")
    return text
