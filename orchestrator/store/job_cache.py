"""Records in memory, and what a transaction's events make of them. The writer's thread alone changes them."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import PolyfleetError
from orchestrator.core.fold import Record, apply, ignored
from orchestrator.core.model import Event
from orchestrator.core.states import TERMINAL

NODE = "node/"
"""What the `job` of an event about a node begins with."""

ENDED_KEPT = 2000

Data = dict[str, Any]


class EventIgnored(PolyfleetError):
    """An event that the job's history has no place for: whoever wrote it did not look at the job first."""

    def __init__(self, job: str, event: str, why: str):
        super().__init__(f"event {event!r} of {job} does not count: {why}", "report this; nothing was stored")
        self.why = why
        self.args = (job, event, why)


def is_open(record: Record) -> bool:
    """Whether anything can still happen to the job: it has not ended, or its attempt still holds devices."""
    return record.job.state not in TERMINAL or record.live is not None


@dataclass(slots=True)
class Batch:
    """What the events of one transaction change: nobody sees it before the transaction is durable.

    `before` has the jobs that are not in memory; `numbers` the new jobs, by id.
    """

    known: Callable[[str], Record | None]
    before: dict[str, Record]
    after: dict[str, Record] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def take(self, events: Iterable[Event], strict: bool) -> None:
        """All of `events` or, when one of them does not count and `strict` says so, none. Raises EventIgnored."""
        changed: dict[str, Record] = {}
        new: dict[str, int] = {}
        for event in events:
            if event.job.startswith(NODE):
                continue
            record = changed.get(event.job) or self.after.get(event.job) or self._before(event.job)
            why, after = apply_event(record, event)
            if why and strict:
                raise EventIgnored(event.job, event.event, why)
            if after is not None and not why:
                changed[event.job] = after
                if record is None:
                    new[event.job] = event.seq
        self.numbers |= new
        self.after |= changed

    def _before(self, job: str) -> Record | None:
        return self.known(job) or self.before.get(job)


def apply_event(record: Record | None, event: Event) -> tuple[str, Record | None]:
    """(why the event does not count or "", the record after it)."""
    try:
        why = ignored(record, event)
        return (why, record) if why else ("", apply(record, event))
    except Exception as e:  # whatever a fold makes of data that another program wrote
        return repr(e), record


class JobCache:
    """Of open jobs all, of ended ones those used last. Safe to read from many threads."""

    def __init__(self, ended_kept: int = ENDED_KEPT) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Record] = {}
        self._ended: OrderedDict[str, Record] = OrderedDict()
        self._ended_kept = ended_kept

    def get(self, job: str) -> Record | None:
        with self._lock:
            if record := self._open.get(job):
                return record
            if record := self._ended.get(job):
                self._ended.move_to_end(job)
            return record

    def open(self) -> list[Record]:
        """In the order of submission."""
        with self._lock:
            return list(self._open.values())

    def put(self, records: Iterable[Record]) -> None:
        with self._lock:
            for record in records:
                self._put(record)

    def put_ended(self, records: Iterable[Record]) -> None:
        """What was read from the database; what is newer in memory stays."""
        with self._lock:
            for record in records:
                if record.job.id not in self._open and not is_open(record):
                    self._put(record)

    def forget(self, jobs: Iterable[str]) -> None:
        with self._lock:
            for job in jobs:
                self._ended.pop(job, None)

    def forget_all(self) -> None:
        with self._lock:
            self._open.clear()

    def turn(self, load: Callable[[list[str]], Iterable[Record]], events: Iterable[Event]) -> Batch:
        """Begin a transaction with `events`; `load` reads records that are not in memory."""
        jobs = dict.fromkeys(event.job for event in events)
        unknown = [job for job in jobs if not job.startswith(NODE) and self.get(job) is None]
        return Batch(self.get, {record.job.id: record for record in load(unknown)} if unknown else {})

    def _put(self, record: Record) -> None:
        job = record.job.id
        if is_open(record):
            self._open[job] = record
            return
        self._open.pop(job, None)
        self._ended[job] = record
        self._ended.move_to_end(job)
        while len(self._ended) > self._ended_kept:
            self._ended.popitem(last=False)


def numbered(events: Iterable[Event], first: int) -> Iterator[Event]:
    return (Event(e.job, e.event, e.epoch, e.time_s, e.data, seq) for seq, e in enumerate(events, first))
