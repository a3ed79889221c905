"""What is to be written: checked in the caller's thread, since a row the database refuses would fail all others that
are written with it.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from cluster.errors import FleetError, UserError
from orchestrator.core.fold import Record
from orchestrator.core.model import Event
from orchestrator.store.codec import decode, encode

LONGEST_JOB = 128
LONGEST_EVENT = 64
LARGEST = 1 << 62

Row = dict[str, Any]
Stored = Callable[[list[Record]], None]


@dataclass(slots=True)
class UnitOfWork:
    """Committed together, or not at all. `rows` are those of `events`, without their `seq`. With `strict`, an event
    that does not count fails the unit. `action` runs in the same transaction. `done` gets the numbers of the events,
    or what the action returned, once all is durable; before anybody can see it, `stored` gets the records of its jobs.
    """

    events: list[Event] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    strict: bool = False
    request: Row | None = None
    benchmark_lines: list[Row] = field(default_factory=list)
    action: Callable[[Connection], Any] | None = None
    stored: Stored | None = None
    done: "Future[Any]" = field(default_factory=Future)


class StoreBusy(FleetError):
    """Nothing of it is stored: its turn did not come in time."""

    retry_after_s = 5


class CommitPending(FleetError):
    """It is being written, and may be stored yet."""

    retry_after_s = 5


def wait_committed(units: Sequence[UnitOfWork], deadline_s: float) -> bool:
    """Whether all are done, waiting for them until then (monotonic; infinite: however long it takes)."""
    for unit in units:
        try:
            unit.done.exception(None if math.isinf(deadline_s) else max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            return False
    return True


def committed_result(unit: UnitOfWork) -> Any:
    """What came of it, or the error."""
    if not unit.done.done():
        return CommitPending(
            "the job store has not confirmed the write", "it may be stored: repeat the request with the same key"
        )
    return unit.done.exception() or unit.done.result()


def make_unit(new: Sequence[Event], strict: bool) -> UnitOfWork:
    """What is folded is what will be read: numbers that JSON has not are words by then. Raises UserError."""
    rows = [_row(event) for event in new]
    as_read = [Event(e.job, e.event, e.epoch, e.time_s, decode(row["data"])) for e, row in zip(new, rows, strict=True)]
    return UnitOfWork(as_read, rows, strict)


def storable(what: str, text: str, longest: int) -> str:
    """`text` itself. Raises UserError."""
    if text.isprintable() and len(text) <= longest:
        return text
    raise UserError(f"{what} {text[:40]!r} cannot be stored", f"use at most {longest} printable characters")


def _row(event: Event) -> Row:
    if not math.isfinite(event.time_s) or not 0 <= event.epoch < LARGEST:
        raise UserError(f"event {event.event!r} has time {event.time_s} and epoch {event.epoch}", "report this")
    return {
        "time": event.time_s,
        "job": storable("job id", event.job, LONGEST_JOB),
        "epoch": event.epoch,
        "event": storable("event", event.event, LONGEST_EVENT),
        "data": encode(event.data),
    }
