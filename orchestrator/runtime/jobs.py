"""The table of jobs: the core's ledger in memory for reading, the event log for ever. An event counts once it is
stored.
"""

import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cluster.errors import FleetError, NotFound, nearest
from orchestrator.core.fold import Ledger, Record, ignored
from orchestrator.core.model import Event, Job
from orchestrator.core.states import TERMINAL, WAITING
from orchestrator.store import EventStore
from orchestrator.store.damage import DamagedRow

HARMLESS = ("checkpoint", "resumed")


class NotStored(FleetError):
    """The job store cannot take anything now: a full disk, a database that is gone. Later it may."""


class Jobs:
    """Safe to use from several threads."""

    def __init__(self, store: EventStore):
        self._store = store
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._metrics: dict[str, dict[str, Any]] = {}
        self.damaged: dict[str, str] = {}
        self._load()

    def _load(self) -> None:
        """The whole log. A job whose history has a row that cannot be used is in `damaged`, with the reason: what it is
        now cannot be told from the rest. A note of a checkpoint may be missing; the pool's folder is looked at anyway.
        """
        stored = self._store.read(0)
        for row in self._store.damage.rows:
            if row.table == "events" and row.event not in HARMLESS:
                self.damaged.setdefault(row.owner, str(row))
        for event in stored:
            before = self._ledger.records.get(event.job)
            try:
                why = ignored(before, event) if self._ledger.apply(event) is before else ""
            except Exception as e:  # whatever a fold makes of data that another program wrote
                why = repr(e)
            if why and event.job not in self.damaged:
                row = DamagedRow("events", event.seq, event.job, event.event, f"cannot be used: {why}")
                self._store.damage.add(row)
                self.damaged[event.job] = str(row)

    def new_id(self, name: str) -> str:
        return f"{name}-{secrets.token_hex(3)}"

    def record(self, event: Event) -> str:
        """Store, then apply; what does not count (see the fold's fencing) is not stored and its reason is returned.

        Raises NotStored, with nothing changed, when the store cannot take it; UserError for data that it never takes.
        """
        with self._lock:
            if reason := ignored(self._ledger.records.get(event.job), event):
                return reason
            try:
                [seq] = self._store.append([event])
            except FleetError as e:
                raise NotStored(*e.args) from e
            self._ledger.apply(replace(event, seq=seq))
        return ""

    def open(self) -> list[Record]:
        return [r for r in self.all() if r.job.state not in TERMINAL or r.live is not None]

    def commit(self, events: Sequence[Event]) -> None:
        with self._lock:
            try:
                numbers = self._store.append(events)
            except FleetError as e:
                raise NotStored(*e.args) from e
            for event, seq in zip(events, numbers, strict=True):
                self._ledger.apply(replace(event, seq=seq))

    def absorb(self, stored: Iterable[Event]) -> None:
        """Apply events that the store has already."""
        with self._lock:
            for event in stored:
                self._ledger.apply(event)

    def __getitem__(self, job_id: str) -> Record:
        return self._ledger.records[job_id]

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._ledger.records

    def get(self, job_id: str) -> Record | None:
        return self._ledger.records.get(job_id)

    def find(self, ref: str) -> Record:
        """By id, by a unique prefix of one, or the newest job of that name. Raises NotFound with the nearest."""
        records = self.all()
        found = [r for r in records if r.job.id == ref] or [r for r in records if r.job.name == ref][-1:]
        found = found or [r for r in records if ref and r.job.id.startswith(ref)]
        if len(found) == 1:
            return found[0]
        if found:
            first = ", ".join(r.job.id for r in found[:5])
            raise NotFound(f"{ref!r} could be any of {len(found)} jobs", f"give more of the id: {first}")
        raise NotFound(f"no job {ref!r}", nearest(ref, [r.job.id for r in records][-50:]))

    def all(self) -> list[Record]:
        """In the order of submission."""
        with self._lock:
            return list(self._ledger.records.values())

    def waiting(self) -> tuple[Job, ...]:
        """Jobs to be placed. A job whose last attempt still has processes is not: two attempts never run at once."""
        free = (r.job for r in self.all() if r.job.state in WAITING and r.live is None)
        return tuple(job for job in free if job.id not in self.damaged)

    def measured(self, job_id: str, metrics: dict[str, Any]) -> None:
        """Remember the newest report of a job."""
        self._metrics[job_id] = metrics

    def metrics(self, job_id: str) -> dict[str, Any]:
        return self._metrics.get(job_id, {})
