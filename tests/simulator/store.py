"""Simulated store: a log of events, with its fold, that survives the server.

It may refuse writes, and may be restored from an older copy.
"""

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.core.controller import nodes
from orchestrator.core.jobs.fold import Record, apply, fold
from orchestrator.core.model import Event
from orchestrator.core.states import TERMINAL


class SimulatedStoreError(Exception):
    """A transaction was not stored."""


class SimulatedStore:
    """The store. `positions`: highest stored position of reports and checkpoints, by (job, epoch)."""

    def __init__(self) -> None:
        self.log: list[Event] = []
        self.records: dict[str, Record] = {}
        self.positions: dict[tuple[str, int], int] = {}
        self.refuses_writes = False
        self.generation = 0

    def append(self, events: Iterable[Event]) -> list[Event]:
        """Store events in one transaction. Raises SimulatedStoreError."""
        if self.refuses_writes:
            raise SimulatedStoreError
        stored = [replace(event, seq=len(self.log) + i) for i, event in enumerate(events, 1)]
        for event in stored:
            self._apply(event)
        return stored

    def _apply(self, event: Event) -> None:
        self.log.append(event)
        if record := apply(self.records.get(event.job), event):
            self.records[event.job] = record
        if event.event == "checkpoint":
            self.report(event.job, event.epoch, event.data["at"])

    def report(self, job: str, epoch: int, at: int) -> None:
        self.positions[job, epoch] = max(at, self.positions.get((job, epoch), 0))

    def last_position(self, job: str, epoch: int) -> int:
        return self.positions.get((job, epoch), 0)

    def open(self) -> list[Record]:
        return [r for r in self.records.values() if r.job.state not in TERMINAL or r.live_attempt is not None]

    def drained(self) -> dict[str, str]:
        return nodes.drained_nodes(event for event in self.log if event.event in nodes.EVENTS)

    def next_generation(self, floor: int = 0) -> int:
        self.generation = max(self.generation, floor) + 1
        return self.generation

    def restore(self, length: int) -> None:
        """Restore a backup with the first `length` events; everything later is lost."""
        log, self.log, self.records, self.positions = self.log[:length], [], {}, {}
        for event in log:
            self._apply(event)

    def refold(self) -> dict[str, Record]:
        return fold(self.log)
