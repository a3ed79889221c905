"""Read the files that an attempt's ranks write, in bounded pieces, and count data that cannot be used."""

import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

from cluster.input.untrusted_files import UnreadableFile, open_untrusted_in, read_json
from workers.protocol.folders import MAX_RECORD_BYTES, MAX_RESULT_BYTES, AttemptFolder, AttemptId
from workers.protocol.messages import InvalidMessage, Outcome, RankEvent
from workers.protocol.rank_events import MAX_LINE_BYTES

log = logging.getLogger(__name__)

CLOCK_MARGIN_S = 86_400.0
"""Tolerance for the times of events: a node's clock may be set while its attempts run."""
REPORTED_TYPES = ("report", "checkpoint")
"""Event types that are sent to the controller; notes stay on the node."""
AGENT_FILES = ("outcome.json", "supervisor.json", "launch.json", "lease", "lock", "stop", "started")


class EventBatch(NamedTuple):
    """Events of some lines, the byte after these lines, and whether there are more complete lines."""

    events: list[RankEvent]
    cursor: int
    more: bool


class RankFileReader:
    """Reads the files of one attempt.

    `unusable_count`: number of entries that could not be used; `reason`: of the last.
    """

    def __init__(self, folder: AttemptFolder):
        self._folder = folder
        self.unusable_count, self.reason = 0, ""
        self._counted_to = 0  # byte up to which unusable lines are counted: a new server reads from the start again
        self._since_s: float | None = None
        self._result: tuple[int, int] | None = None
        self._inspected: tuple[int, int] | None = None
        self._misplaced: set[str] = set()

    def events(self, cursor: int, max_lines: int, max_bytes: int) -> EventBatch:
        """Read events from byte `cursor` on. Raises UnreadableFile if the file is a pipe, a link or a folder."""
        try:
            with open_untrusted_in(self._folder.shared, self._folder.events.name) as descriptor:
                size = os.fstat(descriptor).st_size
                data = os.pread(descriptor, max_bytes, cursor) if size > cursor else b""
        except FileNotFoundError:
            return EventBatch([], cursor, False)
        if size < cursor:
            self.count_unusable(f"events.jsonl was cut from {cursor} bytes or more to {size}")
            return EventBatch([], size, False)
        complete_bytes = data.rfind(b"\n") + 1
        if complete_bytes:
            return self._lines(data[:complete_bytes], cursor, max_lines, cursor + len(data) < size)
        if len(data) <= MAX_LINE_BYTES:
            return EventBatch([], cursor, False)
        self.count_unusable(
            f"a line of events.jsonl is longer than {MAX_LINE_BYTES} bytes; {size - cursor} were skipped"
        )
        return EventBatch([], size, False)

    def _lines(self, data: bytes, cursor: int, max_lines: int, has_more: bool) -> EventBatch:
        *lines, rest = data.split(b"\n", max_lines)
        since_s, until_s = self._start_s() - CLOCK_MARGIN_S, time.time() + CLOCK_MARGIN_S
        events = []
        for line in lines:
            end = cursor + len(line) + 1
            try:
                event = RankEvent.from_line(line, end, since_s, until_s)
            except InvalidMessage as e:
                if cursor >= self._counted_to and line.strip():
                    self.count_unusable(f"a line of events.jsonl {e}")
            else:
                events += [event] if event.type in REPORTED_TYPES else []
            cursor = end
        self._counted_to = max(self._counted_to, cursor)
        return EventBatch(events, cursor, bool(rest) or has_more)

    def _start_s(self) -> float:
        """Time at which the attempt's order was written."""
        if self._since_s is None:
            self._since_s = self._folder.order.stat().st_mtime if self._folder.order.exists() else 0.0
        return self._since_s

    def check_files(self) -> None:
        """Count an unreadable result, and files with names of the agent's own. Called while the ranks run."""
        for name in AGENT_FILES:
            if name not in self._misplaced and os.path.lexists(self._folder.shared / name):
                self._misplaced.add(name)
                self.count_unusable(f"{name} was put where ranks write; it has no effect")
        current = stamp(self._folder.result)
        if (
            current == self._result and current != self._inspected
        ):  # unchanged since the last call, so it is not being written
            self._inspected = current
            try:
                read_json(self._folder.result, MAX_RESULT_BYTES)
            except UnreadableFile as e:
                self.count_unusable(f"result.json {e.reason}")
            except FileNotFoundError:
                return
        self._result = current

    def count_unusable(self, reason: str) -> None:
        """Count data that cannot be used, and log the 1st, 2nd, 4th, 8th, … time."""
        self.unusable_count, self.reason = self.unusable_count + 1, reason
        if self.unusable_count & (self.unusable_count - 1) == 0:
            log.warning("attempt %s: %s (%d so far)", self._folder.path.name, reason, self.unusable_count)


def read_outcome(path: Path, attempt: AttemptId) -> Outcome | None:
    """Read an Outcome; None if there is none yet. Raises UnreadableFile for anything but one of `attempt`."""
    try:
        data = read_json(path, MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    try:
        return Outcome.parse_for(attempt, data)
    except InvalidMessage as e:
        raise UnreadableFile(str(path), str(e)) from None


def stamp(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file is written; None if there is no file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
