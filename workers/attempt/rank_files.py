"""Reads the files that an attempt's ranks write, a bounded piece at a time, and counts what cannot be used."""

import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

from cluster.untrusted_files import UnreadableFile, open_untrusted_in, read_json
from workers.attempt.folders import MOST_RECORD_BYTES, MOST_RESULT_BYTES, AttemptFolder, AttemptId
from workers.messages import InvalidMessage, Outcome, RankEvent
from workers.rank_events import LONGEST_LINE_BYTES

log = logging.getLogger(__name__)

CLOCK_MARGIN_S = 86_400.0
"""A node's clock may be set while its attempts run."""
TOLD = ("report", "checkpoint")
"""What the controller acts on; notes stay on the node."""
OF_THE_AGENT = ("outcome.json", "supervisor.json", "launch.json", "lease", "lock", "stop", "started")


class EventBatch(NamedTuple):
    """Events of some lines, the byte after them, and whether whole lines are left."""

    events: list[RankEvent]
    cursor: int
    more: bool


class RankFileReader:
    """Of one attempt. `refused` counts what could not be used, `reason` says why, for the last of it."""

    def __init__(self, folder: AttemptFolder):
        self._folder = folder
        self.refused, self.reason = 0, ""
        self._judged = 0  # up to this byte lines have been counted: a new server asks from the start again
        self._since_s: float | None = None
        self._result: tuple[int, int] | None = None
        self._inspected: tuple[int, int] | None = None
        self._strange: set[str] = set()

    def events(self, cursor: int, most_lines: int, most_bytes: int) -> EventBatch:
        """From byte `cursor` on. Raises UnreadableFile when no event can ever be read here: a pipe, a link, a
        folder.
        """
        try:
            with open_untrusted_in(self._folder.shared, self._folder.events.name) as descriptor:
                size = os.fstat(descriptor).st_size
                data = os.pread(descriptor, most_bytes, cursor) if size > cursor else b""
        except FileNotFoundError:
            return EventBatch([], cursor, False)
        if size < cursor:
            self.refuse(f"events.jsonl was cut from {cursor} bytes or more to {size}")
            return EventBatch([], size, False)
        whole = data.rfind(b"\n") + 1
        if whole:
            return self._lines(data[:whole], cursor, most_lines, cursor + len(data) < size)
        if len(data) <= LONGEST_LINE_BYTES:
            return EventBatch([], cursor, False)
        self.refuse(f"a line of events.jsonl is longer than {LONGEST_LINE_BYTES} bytes; {size - cursor} were skipped")
        return EventBatch([], size, False)

    def _lines(self, data: bytes, cursor: int, most: int, beyond: bool) -> EventBatch:
        *lines, rest = data.split(b"\n", most)
        since_s, until_s = self._start_s() - CLOCK_MARGIN_S, time.time() + CLOCK_MARGIN_S
        events = []
        for line in lines:
            at = cursor + len(line) + 1
            try:
                event = RankEvent.of_line(line, at, since_s, until_s)
            except InvalidMessage as e:
                if cursor >= self._judged and line.strip():
                    self.refuse(f"a line of events.jsonl {e}")
            else:
                events += [event] if event.type in TOLD else []
            cursor = at
        self._judged = max(self._judged, cursor)
        return EventBatch(events, cursor, bool(rest) or beyond)

    def _start_s(self) -> float:
        """When the attempt was ordered."""
        if self._since_s is None:
            self._since_s = self._folder.order.stat().st_mtime if self._folder.order.exists() else 0.0
        return self._since_s

    def inspect(self) -> None:
        """Count a result that cannot be read, and files that look like the agent's: while the ranks still run."""
        for name in OF_THE_AGENT:
            if name not in self._strange and os.path.lexists(self._folder.shared / name):
                self._strange.add(name)
                self.refuse(f"{name} was put where ranks write; it has no effect")
        found = stamp(self._folder.result)
        if found == self._result and found != self._inspected:  # as at the last look: nobody is writing it
            self._inspected = found
            try:
                read_json(self._folder.result, MOST_RESULT_BYTES)
            except UnreadableFile as e:
                self.refuse(f"result.json {e.why}")
            except FileNotFoundError:
                return
        self._result = found

    def refuse(self, reason: str) -> None:
        """Count it, and log the 1st, 2nd, 4th, 8th, …"""
        self.refused, self.reason = self.refused + 1, reason
        if self.refused & (self.refused - 1) == 0:
            log.warning("attempt %s: %s (%d so far)", self._folder.path.name, reason, self.refused)


def read_outcome(path: Path, attempt: AttemptId) -> Outcome | None:
    """The Outcome there, None while there is none. Raises UnreadableFile for anything but an Outcome of `attempt`."""
    try:
        found = read_json(path, MOST_RECORD_BYTES)
    except FileNotFoundError:
        return None
    try:
        return Outcome.parse_of(attempt, found)
    except InvalidMessage as e:
        raise UnreadableFile(str(path), str(e)) from None


def stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written; None for one that is not there."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
