"""Checkpoints of scripts (`checkpoint: {path: …}` of a `run` job): copies of the last whole version while they run, and
what the next attempt is given. Both are done in a child of the pool's environment, with limits.
"""

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import NotFound, PolyfleetError
from workers.attempt.attempts import AttemptManager
from workers.attempt.folders import read_json
from workers.attempt.output_folder import folder_of
from workers.checkpoint.scripts.change_stamps import Stamp, inside, stamp
from workers.errors import CheckpointError
from workers.interpreter import interpreter
from workers.messages import ScriptCheckpoint
from workers.pool_storage import PoolStorage

LOOK_EVERY_S = 1.0
UNSETTLED_S = 10.0
"""A script that writes all the time is not waited for longer than this: a copy that was changed meanwhile is not used.
"""
REST = 9.0
"""A copy that took a second is followed by nine without."""
LONGEST_TEXT = 2000
"""Of the sentence for the record: names in it are the script's."""
LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    """One attempt's checkpoint. `seen` is as at the last look, `tried` as when it was last copied; `changed_s`: when it
    first changed since, 0 for not.
    """

    folder: Path
    path: str
    format: str
    seen: Stamp = ()
    tried: Stamp = ()
    changed_s: float = 0.0
    due_s: float = 0.0


class ScriptCheckpoints:
    """Of one node. The part of an attempt that has node rank 0 looks after them: its node's storage has them."""

    def __init__(self, attempts: AttemptManager, storage: PoolStorage):
        self._attempts, self._storage = attempts, storage
        self._watched: dict[str, _Watched | None] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        if attempts.live():  # of an agent before us
            self.follow()

    def follow(self) -> None:
        """From now on; most nodes never run such a job."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="script checkpoints", daemon=True)
                self._thread.start()

    def hand_on(self, job: str, epoch: int, path: str, format: str, device: str, count: int) -> dict[str, Any]:  # noqa: A002
        """Before attempt `epoch` starts: {"found", "text"}; see workers/checkpoint/scripts/script_versions.py. What the
        attempt itself may be writing by now is left alone.
        """
        try:
            self._attempts.folder(job, epoch)
        except NotFound:
            folder = self._storage.make(f"{job}/output-{epoch}")
            arguments = {"folder": str(folder), "path": path, "format": format, "device": device, "count": count}
            try:
                told = _run("hand_on", arguments)
            except CheckpointError as e:
                told = {"found": True, "text": f"{path} is carried on unread: {e.message}"}
            return told | {"text": told["text"][:LONGEST_TEXT]}
        return {"found": False, "text": ""}

    def _follow(self) -> None:
        """Never ends: a checkpoint that cannot be copied is tried again when it has changed."""
        while True:
            time.sleep(LOOK_EVERY_S)
            try:
                self.look()
            except Exception:
                LOG.exception("checkpoints of scripts were not looked at")

    def look(self) -> None:
        """Copy those that have changed, one after another."""
        live = {str(attempt.id): attempt for attempt in self._attempts.live()}
        for key in self._watched.keys() - live.keys():
            del self._watched[key]
        for key, attempt in live.items():
            if key not in self._watched and (order := read_json(attempt.folder.order)) is not None:
                self._watched[key] = _watched(order, attempt.id.epoch)
            if watched := self._watched.get(key):
                self._look_at(key, watched)

    def _look_at(self, key: str, it: _Watched) -> None:
        now = time.monotonic()
        try:
            found = stamp(inside(it.folder, it.path))
        except CheckpointError:  # it leads through a link
            return
        settled = found == it.seen or 0 < it.changed_s < now - UNSETTLED_S
        if found != it.seen:
            it.changed_s = it.changed_s or now
            it.seen = found
        if not found or found == it.tried or not settled or now < it.due_s:
            return
        it.tried, it.changed_s = found, 0.0
        self._keep(key, it)
        it.due_s = time.monotonic() + REST * (time.monotonic() - now)

    def _keep(self, key: str, it: _Watched) -> None:
        try:
            told = _run("keep", {"folder": str(it.folder), "path": it.path, "format": it.format})
        except PolyfleetError as e:
            told = {"kept": False, "why": e.message}
        if told["kept"]:
            LOG.info("attempt %s: a copy of %s is kept", key, it.path)
        else:
            LOG.info("attempt %s: no copy of %s is kept: %s", key, it.path, told["why"])


def _watched(order: Any, epoch: int) -> _Watched | None:
    """None for an attempt without a checkpoint of this kind."""
    if order["node_rank"] != 0 or not order["checkpoint_root"]:
        return None
    asked = ScriptCheckpoint.of(order["task"], order["arguments"])
    return asked and _Watched(folder_of(Path(order["checkpoint_root"]), epoch), asked.path, asked.format)


def _run(verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from workers.checkpoint.tools import run_in_child

    told: dict[str, Any] = run_in_child(verb, arguments, python=interpreter())
    return told
