"""Unit of work for the store's writer, checked in the caller's thread, because a row that the database refuses would
fail all others in its transaction.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from cluster.errors import FleetError, UserError
from orchestrator.core.jobs.fold import Record
from orchestrator.core.model import Event
from orchestrator.store.rows.codec import decode, encode

MAX_JOB_ID_LENGTH = 128
MAX_EVENT_LENGTH = 64
MAX_EPOCH = 1 << 62

Row = dict[str, Any]
Stored = Callable[[list[Record]], None]


@dataclass(slots=True)
class UnitOfWork:
    """Data to commit together. `rows` are those of `events`. Rows have no `seq` yet. With `strict`, an invalid event
    fails the unit. `action` runs in the same transaction. When everything is durable, and before readers can see it,
    `stored` is called with the records of its jobs; then `done` gets the numbers of the events, or the result of the
    action.
    """

    events: list[Event] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    strict: bool = False
    request: Row | None = None
    benchmark_lines: list[Row] = field(default_factory=list)
    metrics: list[Row] = field(default_factory=list)
    action: Callable[[Connection], Any] | None = None
    stored: Stored | None = None
    done: "Future[Any]" = field(default_factory=Future)


class StoreBusy(FleetError):
    """The store was too busy to write in time; nothing is stored."""

    retry_after_s = 5


class CommitPending(FleetError):
    """The write is in progress and may still succeed."""

    retry_after_s = 5


def wait_committed(units: Sequence[UnitOfWork], deadline_s: float) -> bool:
    """Wait until all units are done, at most until `deadline_s` (monotonic; infinite: no limit). Return whether they
    are.
    """
    for unit in units:
        try:
            unit.done.exception(None if math.isinf(deadline_s) else max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            return False
    return True


def committed_result(unit: UnitOfWork) -> Any:
    """Result or error of a unit."""
    if not unit.done.done():
        return CommitPending(
            "the job store has not confirmed the write", "it may be stored: repeat the request with the same key"
        )
    return unit.done.exception() or unit.done.result()


def make_unit(new: Sequence[Event], strict: bool) -> UnitOfWork:
    """Make a unit of events. Their data is encoded and decoded, so that records are built from exactly what will be
    read later (JSON has no NaN). Raises UserError.
    """
    rows = [_row(event) for event in new]
    as_read = [Event(e.job, e.event, e.epoch, e.time_s, decode(row["data"])) for e, row in zip(new, rows, strict=True)]
    return UnitOfWork(as_read, rows, strict)


def make_metrics_row(job: str, epoch: int, step: Any, time_s: Any, data: dict[str, Any], at: int = 0) -> Row:
    """Make a row of the metrics of one step. `at` is the offset in the attempt's events file after it.

    A step or time that a database cannot store is stored as 0, because metrics come from users' code. Raises UserError
    for metrics that are not plain data.
    """
    row = {"job": check_storable("job id", job, MAX_JOB_ID_LENGTH), "epoch": epoch, "data": encode(data), "at": at}
    has_step = isinstance(step, int) and abs(step) < MAX_EPOCH
    has_time = isinstance(time_s, int | float) and math.isfinite(time_s)
    return row | {"step": step if has_step else 0, "time": time_s if has_time else 0.0}


def check_storable(name: str, text: str, max_length: int) -> str:
    """Return `text`. Raises UserError if it cannot be stored."""
    if text.isprintable() and len(text) <= max_length:
        return text
    raise UserError(f"{name} {text[:40]!r} cannot be stored", f"use at most {max_length} printable characters")


def _row(event: Event) -> Row:
    if not math.isfinite(event.time_s) or not 0 <= event.epoch < MAX_EPOCH:
        raise UserError(
            f"event {event.event!r} has time {event.time_s} and epoch {event.epoch}", "this is a bug in Polyfleet"
        )
    return {
        "time": event.time_s,
        "job": check_storable("job id", event.job, MAX_JOB_ID_LENGTH),
        "epoch": event.epoch,
        "event": check_storable("event", event.event, MAX_EVENT_LENGTH),
        "data": encode(event.data),
    }
