"""Cache of records, and their changes by the events of a transaction. Only the writer's thread changes it."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import PolyfleetError
from orchestrator.core.jobs.fold import Record, apply, ignored_reason
from orchestrator.core.model import Event
from orchestrator.core.states import TERMINAL

NODE_PREFIX = "node/"
"""Prefix of `job` in an event about a node."""

MAX_ENDED = 2000

Data = dict[str, Any]


class InvalidEvent(PolyfleetError):
    """An event that is not valid in the job's state: the code that wrote it did not check the job first."""

    def __init__(self, job: str, event: str, why: str):
        super().__init__(
            f"event {event!r} of {job} is not valid: {why}", "nothing was stored; this is a bug in Polyfleet"
        )
        self.reason = why
        self.args = (job, event, why)


def is_open(record: Record) -> bool:
    """Return whether the job can still change: it has not ended, or its attempt still has devices."""
    return record.job.state not in TERMINAL or record.live_attempt is not None


@dataclass(slots=True)
class Batch:
    """Changes by the events of one transaction; invisible to readers until the transaction is durable.

    `before` contains jobs that are not in the cache, `numbers` the numbers of new jobs, by id.
    """

    find: Callable[[str], Record | None]
    before: dict[str, Record]
    after: dict[str, Record] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, events: Iterable[Event], strict: bool) -> None:
        """Apply `events`, except invalid ones. With `strict`, raise InvalidEvent if any is invalid, and apply none."""
        changed: dict[str, Record] = {}
        new: dict[str, int] = {}
        for event in events:
            if event.job.startswith(NODE_PREFIX):
                continue
            record = changed.get(event.job) or self.after.get(event.job) or self._before(event.job)
            reason, after = apply_event(record, event)
            if reason and strict:
                raise InvalidEvent(event.job, event.event, reason)
            if after is not None and not reason:
                changed[event.job] = after
                if record is None:
                    new[event.job] = event.seq
        self.numbers |= new
        self.after |= changed

    def _before(self, job: str) -> Record | None:
        return self.find(job) or self.before.get(job)


def apply_event(record: Record | None, event: Event) -> tuple[str, Record | None]:
    """(why the event is invalid or "", the record after it)."""
    try:
        reason = ignored_reason(record, event)
        return (reason, record) if reason else ("", apply(record, event))
    except Exception as e:  # applying data that another program wrote may raise anything
        return repr(e), record


class JobCache:
    """Records of all open jobs and of the most recently used ended ones. Thread-safe for reading."""

    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Record] = {}
        self._ended: OrderedDict[str, Record] = OrderedDict()
        self._max_ended = max_ended

    def get(self, job: str) -> Record | None:
        with self._lock:
            if record := self._open.get(job):
                return record
            if record := self._ended.get(job):
                self._ended.move_to_end(job)
            return record

    def open(self) -> list[Record]:
        """Open jobs in the order of submission."""
        with self._lock:
            return list(self._open.values())

    def put(self, records: Iterable[Record]) -> None:
        with self._lock:
            for record in records:
                self._put(record)

    def put_ended(self, records: Iterable[Record]) -> None:
        """Add ended jobs that were read from the database, unless the cache has newer records."""
        with self._lock:
            for record in records:
                if record.job.id not in self._open and not is_open(record):
                    self._put(record)

    def remove(self, jobs: Iterable[str]) -> None:
        with self._lock:
            for job in jobs:
                self._ended.pop(job, None)

    def clear_open(self) -> None:
        with self._lock:
            self._open.clear()

    def begin_batch(self, load: Callable[[list[str]], Iterable[Record]], events: Iterable[Event]) -> Batch:
        """Begin a transaction with `events`; `load` reads records that are not in memory."""
        jobs = dict.fromkeys(event.job for event in events)
        unknown = [job for job in jobs if not job.startswith(NODE_PREFIX) and self.get(job) is None]
        return Batch(self.get, {record.job.id: record for record in load(unknown)} if unknown else {})

    def _put(self, record: Record) -> None:
        job = record.job.id
        if is_open(record):
            self._open[job] = record
            return
        self._open.pop(job, None)
        self._ended[job] = record
        self._ended.move_to_end(job)
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)


def number_events(events: Iterable[Event], first: int) -> Iterator[Event]:
    return (Event(e.job, e.event, e.epoch, e.time_s, e.data, seq) for seq, e in enumerate(events, first))
