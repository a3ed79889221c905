"""One attempt as the agent sees it: nothing but what its folder says, so a restarted agent sees the same."""

import json
import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cluster import log_files
from cluster.errors import NotFound, UserError
from cluster.untrusted_files import UnreadableFile, read_bytes
from workers.attempt import disk_full, folder_removal, reserved_files
from workers.attempt.folders import AttemptFolder, AttemptId, read_json, replace_text, write_json
from workers.attempt.rank_files import EventBatch, RankFileReader, read_outcome, stamp
from workers.attempt.supervisor_handle import STOP_BYTES, SupervisorHandle, requested_stop
from workers.message_fields import LONGEST_TEXT
from workers.messages import STOPS, AttemptStatus, Failure, Outcome

log = logging.getLogger(__name__)

LOOK_FOR_SUPERVISOR_S = 0.3
MOST_COMPLAINT_BYTES = 1 << 20
BACKLOG_PAUSE_S = 0.25
"""After a full share of events: a job that tells more than anybody can use must not keep the controller busy."""
DRAIN_S = 5.0
"""How long an attempt that has ended may go on telling events it wrote before."""


class LocalAttempt:
    """`starting`: the folder is being made, there is no supervisor yet. `gone`: somebody removed it. `draining`: it has
    ended, and events are left to tell. `unreadable`: "" or what its ranks broke, for which it ends as failed.
    """

    def __init__(self, attempt: AttemptId, folder: AttemptFolder, lease_s: float):
        self.id = attempt
        self.folder = folder
        self.lease_s = lease_s
        self.life = SupervisorHandle(folder, lease_s)
        self.starting = False
        self.gone = False
        self.draining = False
        self.reader = RankFileReader(folder)
        self.unreadable = _reason(read_json(folder.unreadable))
        self._ended: Outcome | None = None
        self._no_outcome: tuple[int, int] | None = None
        self._ending = threading.Lock()
        self._drain_until_s = 0.0
        self._cut = False
        self._paused_until_s = 0.0
        self._looked_s = 0.0
        self._troubles = 0

    @property
    def outcome(self) -> Outcome | None:
        """None while it lives. A file in its place that is no Outcome of this attempt fails the attempt."""
        if self._ended is None and (found := stamp(self.folder.outcome)) != self._no_outcome:
            try:
                self._ended = read_outcome(self.folder.outcome, self.id)
            except UnreadableFile as e:
                self._spoil_by("outcome.json", e)
                self._no_outcome = None if e.passing else found
        if self._ended is None or not self.unreadable:
            return self._ended
        failure = self._failure("unreadable", self.unreadable)
        return replace(self._ended, state="failed", failure=failure, result={})

    @property
    def phase(self) -> str:
        if self.outcome is not None:
            return "ended"
        return "running" if self.folder.started.exists() else "starting"

    @property
    def live(self) -> bool:
        return self.outcome is None

    def settle(self) -> None:
        """An attempt whose supervisor is gone without an outcome is lost: kill what it left, and say so."""
        now = time.monotonic()
        if self.starting or self.outcome is not None or now - self._looked_s < LOOK_FOR_SUPERVISOR_S:
            return
        self._looked_s = now
        self.reader.inspect()
        if self.unreadable:
            with suppress(OSError):  # a full disk: its lease is not renewed either
                self.stop("cancel")
        self.gone = not self.folder.path.is_dir()
        if self.gone or self.life.goes_on() or self.outcome is not None or not self._ending.acquire(blocking=False):
            return
        if self.starting:  # since it was looked at; see begin
            self._ending.release()
            return
        threading.Thread(target=self._end, name=f"end {self.id}", daemon=True).start()

    def begin(self) -> bool:
        """Take it for starting; False where it is being ended, or has ended, without ever having had a supervisor.

        An agent before us was killed amid its start. Whoever is told that it was lost may have replaced it.
        """
        self.starting = True
        if self._ending.locked() or (self.outcome is not None and not self.folder.supervisor.exists()):
            self.starting = False
        return self.starting

    def _end(self) -> None:
        """In a thread of its own: processes that fork or that the kernel does not kill take seconds."""
        try:
            self.life.end()
            if self.outcome is None:
                self._ended = Outcome(*self.id, "lost", {}, self._why_lost(), ended_s=time.time())
                with suppress(OSError):  # whoever comes after us finds the same and says the same
                    reserved_files.replace_or_use_reserve(
                        self.folder.outcome, json.dumps(self._ended.to_plain()), durable=True
                    )
        finally:
            self._ending.release()

    def renew(self, asked_s: float | None = None) -> None:
        """Give it its full lease, from the time of the controller's word; not one that never got a supervisor."""
        if self.starting or self.life.recorded is not None:
            self.life.renew(asked_s)

    def _why_lost(self) -> Failure:
        """Of kind `storage` where a full disk ended the supervisor, which can hardly have said so."""
        try:
            said = read_bytes(self.folder.complaints, MOST_COMPLAINT_BYTES).decode(errors="replace")
        except (FileNotFoundError, UnreadableFile):
            said = ""
        last = (said.strip().splitlines() or ["killed from outside, or the node went down"])[-1]
        disk = disk_full.full_disk([self.folder.path])
        kind = "storage" if disk or disk_full.mentions_full_disk(last) else "lost"
        message = "; ".join(filter(None, (f"the attempt's supervisor is gone: {last}", disk)))
        return self._failure(kind, message)

    def _failure(self, kind: str, message: str) -> Failure:
        """Of the whole part, told by its node and first rank."""
        launched: Any = read_json(self.folder.launch)
        try:
            node, rank = str(launched["node"]), int(launched["ranks"][0]["rank"])
        except (TypeError, KeyError, IndexError, ValueError):
            node, rank = "", 0
        return Failure(rank, node, kind, message[:LONGEST_TEXT])

    def spoil(self, reason: str) -> None:
        """Its ranks broke what we read of them: it is stopped, and ends as failed of kind `unreadable`."""
        if self.unreadable:
            return
        self.unreadable = reason
        log.warning("attempt %s is unreadable and is stopped: %s", self.id, reason)
        with suppress(OSError):  # a full disk: a new agent finds the same again
            write_json(self.folder.unreadable, {"reason": reason})

    def _spoil_by(self, name: str, error: UnreadableFile) -> None:
        if error.passing:
            self.trouble(f"{name} {error.why}")
        else:
            self.spoil(f"{name} {error.why}")

    def trouble(self, why: str) -> None:
        """The node cannot look at this attempt now. The 1st, 2nd, 4th, 8th, … time is logged."""
        self._troubles += 1
        if self._troubles & (self._troubles - 1) == 0:
            log.error("attempt %s cannot be looked at now: %s (%d times)", self.id, why, self._troubles)

    @property
    def poison(self) -> dict[str, Any] | None:
        """How often its ranks wrote what cannot be used, and why not: {"count", "reason"}; None for never."""
        count, reason = self.reader.refused, self.unreadable or self.reader.reason
        return {"count": max(count, 1), "reason": reason} if reason else None

    def report(self, cursor: int, known: str, most_lines: int, most_bytes: int) -> AttemptStatus | None:
        """When there is news: another phase than `known`, or events from `cursor` on."""
        phase = self.phase
        told = self._events(cursor, phase == "ended", most_lines, most_bytes)
        phase = "running" if self.draining else phase
        if phase == known and told.cursor == cursor:
            return None
        ended = self.outcome if phase == "ended" else None
        return AttemptStatus(*self.id, phase, tuple(told.events), told.cursor, ended)

    def _events(self, cursor: int, ended: bool, most_lines: int, most_bytes: int) -> EventBatch:
        """The next ones, unless its file cannot be read, or it tells too many: an end comes after the events before it,
        but within DRAIN_S.
        """
        now, told = time.monotonic(), EventBatch([], cursor, False)
        if self.draining and now >= self._drain_until_s and not self._cut:
            self._cut = True
            self.reader.refuse(f"events.jsonl was not read to its end: it took longer than {DRAIN_S:.0f} s")
        if not (self.unreadable or self._cut or (now < self._paused_until_s and not ended)):
            try:
                told = self.reader.events(cursor, most_lines, most_bytes)
            except UnreadableFile as e:
                self._spoil_by("events.jsonl", e)
            self._paused_until_s = now + BACKLOG_PAUSE_S if told.more else 0.0
        self.draining = ended and told.more
        if self.draining and not self._drain_until_s:
            self._drain_until_s = now + DRAIN_S
        return told

    def stop(self, how: str) -> None:
        """Ask the supervisor; `cancel` and `fence` replace `preempt`, and nothing replaces these."""
        if how not in STOPS:
            raise UserError(f"cannot stop an attempt by {how!r}", f"valid: {', '.join(STOPS)}")
        before = requested_stop(self.folder.stop)
        if self.outcome is not None or (before and how == "preempt"):
            return
        if before in ("", "preempt"):
            reserved_files.replace_or_use_reserve(self.folder.stop, f"{how}\n".rjust(STOP_BYTES))
        self.life.wake()

    def forget(self) -> None:
        """Remove what the ranks wrote; logs and records stay. Raises UserError while it runs.

        In this order: on a disk without a file left only the removal makes space for the mark.
        """
        if self.live:
            raise UserError(f"attempt {self.id} has not ended", "stop it first")
        folder_removal.remove(self.folder.shared)
        replace_text(self.folder.forgotten, "")

    def log(self, rank: int, offset: int, limit_bytes: int) -> dict[str, Any]:
        """Whole lines of a rank's log from byte `offset`: {"data", "next", "more", "ended"}; `more`: there are more
        now; ended once no more can come. What the log no longer has is one line that says how much it was."""
        ended = not self.live
        try:
            found = log_files.read(self.folder.log(rank), offset, limit_bytes)
        except FileNotFoundError:
            if ended:
                raise NotFound(f"attempt {self.id} has no rank {rank} on this node", "`show` lists the ranks") from None
            return {"data": "", "next": offset, "more": False, "ended": False}
        return {
            "data": found.data.decode("utf-8", "replace"),
            "next": found.next,
            "more": found.more,
            "ended": ended and not found.more,
        }

    def log_tail(self, rank: int, count: int) -> dict[str, int]:
        """{"start", "end"}: the bytes between which the last `count` lines of a rank's log lie."""
        try:
            start, end = log_files.last(self.folder.log(rank), count)
        except FileNotFoundError:
            start = end = 0
        return {"start": start, "end": end}


def _reason(found: Any) -> str:
    return str(found.get("reason", "")) if isinstance(found, dict) else ""
