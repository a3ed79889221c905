"""One attempt as the agent sees it.

All state comes from the attempt's folder, so a restarted agent sees the same.
"""

import json
import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cluster.errors import NotFound, UserError
from cluster.host import log_files
from cluster.input.untrusted_files import UnreadableFile, read_bytes
from workers.attempt.rank_files import EventBatch, RankFileReader, read_outcome, stamp
from workers.attempt.supervision.supervisor_handle import STOP_BYTES, SupervisorHandle, requested_stop
from workers.processes import disk_full
from workers.protocol import reserved_files
from workers.protocol.folders import AttemptFolder, AttemptId, read_json, replace_text, write_json
from workers.protocol.message_fields import MAX_TEXT_LENGTH
from workers.protocol.messages import STOPS, AttemptStatus, Failure, Outcome
from workers.storage import folder_removal

log = logging.getLogger(__name__)

CHECK_SUPERVISOR_EVERY_S = 0.3
MAX_SUPERVISOR_LOG_BYTES = 1 << 20
BACKLOG_PAUSE_S = 0.25
"""Pause after a full batch of events, so that a job that writes too many does not keep the controller busy."""
DRAIN_S = 5.0
"""Maximum time for reading the remaining events of an attempt that has ended."""


class LocalAttempt:
    """An attempt on this node.

    `is_starting`: its folder is being created, it has no supervisor yet. `is_removed`: its folder was removed.
    `is_draining`: it has ended, and events remain to be reported. `unreadable`: "", or why the files of its ranks
    cannot be read, for which it ends as failed.
    """

    def __init__(self, attempt: AttemptId, folder: AttemptFolder, lease_s: float):
        self.id = attempt
        self.folder = folder
        self.lease_s = lease_s
        self.supervisor = SupervisorHandle(folder, lease_s)
        self.is_starting = False
        self.is_removed = False
        self.is_draining = False
        self.reader = RankFileReader(folder)
        self.unreadable = _reason(read_json(folder.unreadable))
        self._ended: Outcome | None = None
        self._no_outcome: tuple[int, int] | None = None
        self._ending = threading.Lock()
        self._drain_until_s = 0.0
        self._is_cut_off = False
        self._paused_until_s = 0.0
        self._checked_s = 0.0
        self._check_failures = 0

    @property
    def outcome(self) -> Outcome | None:
        """Its Outcome, None while it runs. An outcome file with anything else in it fails the attempt."""
        if self._ended is None and (current_stamp := stamp(self.folder.outcome)) != self._no_outcome:
            try:
                self._ended = read_outcome(self.folder.outcome, self.id)
            except UnreadableFile as e:
                self._handle_unreadable("outcome.json", e)
                self._no_outcome = None if e.is_transient else current_stamp
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
    def is_live(self) -> bool:
        return self.outcome is None

    def check_supervisor(self) -> None:
        """Check the supervisor; if it exited without an outcome, clean up and record the attempt as lost."""
        now = time.monotonic()
        if self.is_starting or self.outcome is not None or now - self._checked_s < CHECK_SUPERVISOR_EVERY_S:
            return
        self._checked_s = now
        self.reader.check_files()
        if self.unreadable:
            with suppress(OSError):  # the disk may be full; the attempt then ends with its lease, which is not renewed
                self.stop("cancel")
        self.is_removed = not self.folder.path.is_dir()
        if (
            self.is_removed
            or self.supervisor.is_healthy()
            or self.outcome is not None
            or not self._ending.acquire(blocking=False)
        ):
            return
        if self.is_starting:  # `mark_starting` was called after the check above
            self._ending.release()
            return
        threading.Thread(target=self._end, name=f"end {self.id}", daemon=True).start()

    def mark_starting(self) -> bool:
        """Mark it as starting.

        Return False if it is being ended, or has ended, without ever having had a supervisor. An earlier agent was then
        killed during the start, and the controller may have replaced the attempt as lost.
        """
        self.is_starting = True
        if self._ending.locked() or (self.outcome is not None and not self.folder.supervisor.exists()):
            self.is_starting = False
        return self.is_starting

    def _end(self) -> None:
        """Kill its processes and record it as lost.

        Runs in a thread: processes that fork or hang take seconds.
        """
        try:
            self.supervisor.kill()
            if self.outcome is None:
                self._ended = Outcome(*self.id, "lost", {}, self._lost_failure(), ended_s=time.time())
                with suppress(OSError):  # a later agent comes to the same result
                    reserved_files.replace_or_use_reserve(
                        self.folder.outcome, json.dumps(self._ended.to_plain()), durable=True
                    )
        finally:
            self._ending.release()

    def renew(self, requested_s: float | None = None) -> None:
        """Renew its full lease from `requested_s` on (default: now), unless it never got a supervisor."""
        if self.is_starting or self.supervisor.pids is not None:
            self.supervisor.renew(requested_s)

    def _lost_failure(self) -> Failure:
        """Failure of a lost attempt, of kind `storage` if a full disk ended the supervisor silently."""
        try:
            stderr = read_bytes(self.folder.supervisor_log, MAX_SUPERVISOR_LOG_BYTES).decode(errors="replace")
        except (FileNotFoundError, UnreadableFile):
            stderr = ""
        last_line = (stderr.strip().splitlines() or ["killed from outside, or the node went down"])[-1]
        disk = disk_full.describe_full_disk([self.folder.path])
        kind = "storage" if disk or disk_full.mentions_full_disk(last_line) else "lost"
        message = "; ".join(filter(None, (f"the attempt's supervisor is gone: {last_line}", disk)))
        return self._failure(kind, message)

    def _failure(self, kind: str, message: str) -> Failure:
        """A failure of all ranks on this node, under the number of the first one."""
        record: Any = read_json(self.folder.launch)
        try:
            node, rank = str(record["node"]), int(record["ranks"][0]["rank"])
        except (TypeError, KeyError, IndexError, ValueError):
            node, rank = "", 0
        return Failure(rank, node, kind, message[:MAX_TEXT_LENGTH])

    def mark_unreadable(self, reason: str) -> None:
        """Stop it because the files of its ranks cannot be read. It ends as failed, of kind `unreadable`."""
        if self.unreadable:
            return
        self.unreadable = reason
        log.warning("attempt %s is stopped, because files of its ranks cannot be read: %s", self.id, reason)
        with suppress(OSError):  # the disk may be full; a new agent notices the same again
            write_json(self.folder.unreadable, {"reason": reason})

    def _handle_unreadable(self, name: str, error: UnreadableFile) -> None:
        if error.is_transient:
            self.log_check_failure(f"{name} {error.reason}")
        else:
            self.mark_unreadable(f"{name} {error.reason}")

    def log_check_failure(self, reason: str) -> None:
        """Note that the node cannot check this attempt now. Logs the 1st, 2nd, 4th, 8th, … time."""
        self._check_failures += 1
        if self._check_failures & (self._check_failures - 1) == 0:
            log.error("attempt %s cannot be checked now: %s (%d times)", self.id, reason, self._check_failures)

    @property
    def unusable_data(self) -> dict[str, Any] | None:
        """{"count", "reason"} of data that its ranks wrote and that cannot be used; None if there was none."""
        count, reason = self.reader.unusable_count, self.unreadable or self.reader.reason
        return {"count": max(count, 1), "reason": reason} if reason else None

    def status_if_changed(self, cursor: int, last_phase: str, max_lines: int, max_bytes: int) -> AttemptStatus | None:
        """Return its status if the phase is not `last_phase` or there are events from `cursor` on, else None."""
        phase = self.phase
        batch = self._events(cursor, phase == "ended", max_lines, max_bytes)
        phase = "running" if self.is_draining else phase
        if phase == last_phase and batch.cursor == cursor:
            return None
        outcome = self.outcome if phase == "ended" else None
        return AttemptStatus(*self.id, phase, tuple(batch.events), batch.cursor, outcome)

    def _events(self, cursor: int, has_ended: bool, max_lines: int, max_bytes: int) -> EventBatch:
        """Read the next events; none while the file cannot be read, or in the pause after a full batch.

        The end of the attempt is reported after all its events, but at most DRAIN_S later.
        """
        now, batch = time.monotonic(), EventBatch([], cursor, False)
        if self.is_draining and now >= self._drain_until_s and not self._is_cut_off:
            self._is_cut_off = True
            self.reader.count_unusable(
                f"events.jsonl was not read to its end: reading took longer than {DRAIN_S:.0f} s"
            )
        if not (self.unreadable or self._is_cut_off or (now < self._paused_until_s and not has_ended)):
            try:
                batch = self.reader.events(cursor, max_lines, max_bytes)
            except UnreadableFile as e:
                self._handle_unreadable("events.jsonl", e)
            self._paused_until_s = now + BACKLOG_PAUSE_S if batch.more else 0.0
        self.is_draining = has_ended and batch.more
        if self.is_draining and not self._drain_until_s:
            self._drain_until_s = now + DRAIN_S
        return batch

    def stop(self, how: str) -> None:
        """Request the supervisor to stop; `cancel` and `fence` replace `preempt`, and nothing replaces these."""
        if how not in STOPS:
            raise UserError(f"cannot stop an attempt by {how!r}", f"choose from {', '.join(STOPS)}")
        requested = requested_stop(self.folder.stop)
        if self.outcome is not None or (requested and how == "preempt"):
            return
        if requested in ("", "preempt"):
            reserved_files.replace_or_use_reserve(self.folder.stop, f"{how}\n".rjust(STOP_BYTES))
        self.supervisor.wake()

    def remove_rank_files(self) -> None:
        """Remove what the ranks wrote, keep logs and records. Raises UserError while it runs.

        The removal comes first: on a disk without free files only it makes space for the mark `removed`.
        """
        if self.is_live:
            raise UserError(f"attempt {self.id} has not ended", "stop it first")
        folder_removal.remove(self.folder.shared)
        replace_text(self.folder.removed_mark, "")

    def log(self, rank: int, offset: int, limit_bytes: int) -> dict[str, Any]:
        """Return complete lines of a rank's log from byte `offset`: {"data", "next", "more", "ended"}.

        `more`: it has more lines now; `ended`: there will be no more. A part that the log no longer has is replaced by
        a line with its size.
        """
        has_ended = not self.is_live
        try:
            piece = log_files.read(self.folder.log(rank), offset, limit_bytes)
        except FileNotFoundError:
            if has_ended:
                raise NotFound(
                    f"attempt {self.id} has no rank {rank} on this node", "`polyfleet show` lists its ranks"
                ) from None
            return {"data": "", "next": offset, "more": False, "ended": False}
        return {
            "data": piece.data.decode("utf-8", "replace"),
            "next": piece.next,
            "more": piece.more,
            "ended": has_ended and not piece.more,
        }

    def log_tail(self, rank: int, count: int) -> dict[str, int]:
        """Return the byte range of the last `count` lines of a rank's log: {"start", "end"}."""
        try:
            start, end = log_files.last(self.folder.log(rank), count)
        except FileNotFoundError:
            start = end = 0
        return {"start": start, "end": end}


def _reason(data: Any) -> str:
    return str(data.get("reason", "")) if isinstance(data, dict) else ""
