"""One attempt as the agent sees it: nothing but what its folder says, so a restarted agent sees the same."""

import json
import shutil
import time
from contextlib import suppress
from typing import Any

from cluster.errors import NotFound, UserError
from cluster.plain import from_plain
from workers.attempt import outcome, reserve
from workers.attempt.life import STOP_BYTES, Life
from workers.attempt.records import AttemptId, Folder, read_json, replace_text
from workers.messages import Outcome

LOOK_FOR_SUPERVISOR_S = 0.3
MOST_EVENT_BYTES = 1 << 20
MOST_LOG_BYTES = 1 << 20
FIELDS: dict[str, Any] = {"t": (int, float), "rank": int, "type": str}
FIELDS_OF: dict[str, dict[str, Any]] = {"checkpoint": {"path": str, "step": int}}


class Attempt:
    """`starting`: the folder is being made, there is no supervisor yet. `gone`: somebody removed it."""

    def __init__(self, attempt: AttemptId, folder: Folder, lease_s: float):
        self.id = attempt
        self.folder = folder
        self.lease_s = lease_s
        self.life = Life(folder, lease_s)
        self.starting = False
        self.gone = False
        self._ended: dict[str, Any] | None = None
        self._looked_s = 0.0

    @property
    def outcome(self) -> dict[str, Any] | None:
        """None while it lives. User code can write this file too: what is no Outcome does not count."""
        if self._ended is None and self.folder.outcome.exists():
            self._ended = _checked(read_json(self.folder.outcome))
        return self._ended

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
        self.gone = not self.folder.path.is_dir()
        if self.gone or self.life.goes_on() or self.outcome is not None:
            return
        self.life.end()
        if self.outcome is None:
            self._ended = outcome.outcome(self.id, "lost", {}, self._why_lost())
            with suppress(OSError):  # whoever comes after us finds the same and says the same
                reserve.put(self.folder.outcome, json.dumps(self._ended), durable=True)

    def renew(self, asked_s: float | None = None) -> None:
        """Give it its full lease, from the time of the controller's word; not one that never got a supervisor."""
        if self.starting or self.life.recorded is not None:
            self.life.renew(asked_s)

    def _why_lost(self) -> dict[str, Any]:
        said = self.folder.complaints.read_text(errors="replace") if self.folder.complaints.exists() else ""
        last = (said.strip().splitlines() or ["killed from outside, or the node went down"])[-1]
        return outcome.failure(0, "", "internal", f"the attempt's supervisor is gone: {last}")

    def report(self, cursor: int, known: str) -> dict[str, Any] | None:
        """An AttemptReport as plain data when there is news: another phase than `known`, or events from `cursor` on."""
        phase = self.phase
        events, after = self._events(cursor)
        if phase == known and after == cursor:
            return None
        named = {"job": self.id.job, "epoch": self.id.epoch, "node_rank": self.id.node_rank, "phase": phase}
        return {**named, "events": events, "cursor": after, "outcome": self.outcome if phase == "ended" else None}

    def _events(self, cursor: int) -> tuple[list[dict[str, Any]], int]:
        """Whole lines from byte `cursor` on, at most 1 MiB. User code can write here: what is no event is skipped."""
        try:
            if self.folder.events.stat().st_size <= cursor:
                return [], cursor
            with self.folder.events.open("rb") as f:
                f.seek(cursor)
                data = f.read(MOST_EVENT_BYTES)
        except OSError:
            return [], cursor
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == MOST_EVENT_BYTES else b"")
        return [event for line in whole.splitlines() if (event := _event(line)) is not None], cursor + len(whole)

    def stop(self, how: str) -> None:
        """Ask the supervisor; `cancel` replaces `preempt`, never the other way round."""
        if how not in ("preempt", "cancel"):
            raise UserError(f"cannot stop an attempt by {how!r}", "valid: preempt, cancel")
        if not self.live or (self.folder.stop.exists() and how == "preempt"):
            return
        reserve.put(self.folder.stop, f"{how}\n".rjust(STOP_BYTES))
        self.life.wake()

    def forget(self) -> None:
        """Remove what the ranks wrote; logs and records stay. Raises UserError while it runs."""
        if self.live:
            raise UserError(f"attempt {self.id} has not ended", "stop it first")
        shutil.rmtree(self.folder.shared, ignore_errors=True)
        replace_text(self.folder.forgotten, "")

    def log(self, rank: int, offset: int, limit_bytes: int) -> dict[str, Any]:
        """Whole lines of a rank's log from byte `offset`: {"data", "next", "ended"}; ended once no more can come."""
        ended = not self.live
        try:
            with self.folder.log(rank).open("rb") as f:
                f.seek(offset)
                data = f.read(max(1, min(limit_bytes, MOST_LOG_BYTES)))
                at_end = not f.read(1)
        except FileNotFoundError:
            if ended:
                raise NotFound(f"attempt {self.id} has no rank {rank} on this node", "`show` lists the ranks") from None
            return {"data": "", "next": offset, "ended": False}
        whole = data[: data.rfind(b"\n") + 1] or (b"" if at_end else data)
        return {
            "data": whole.decode("utf-8", "replace"),
            "next": offset + len(whole),
            "ended": ended and at_end and len(whole) == len(data),
        }


def _checked(found: Any) -> dict[str, Any] | None:
    try:
        from_plain(Outcome, found)
    except UserError:
        return None
    return dict(found)


def _event(line: bytes) -> dict[str, Any] | None:
    """An event with the fields that every event, or its type, must have; None for anything else."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not _has(event, FIELDS) or not _has(event, FIELDS_OF.get(event["type"], {})):
        return None
    return event


def _has(event: dict[str, Any], fields: dict[str, Any]) -> bool:
    return all(isinstance(event.get(name), kind) for name, kind in fields.items())
