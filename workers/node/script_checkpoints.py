"""Checkpoints of scripts (`checkpoint: {path: …}` of a `run` job).

While a script runs, the last complete version is copied; before the next attempt, a version is chosen for it. Both
happen in a child process in the pool's environment, with resource limits.
"""

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import NotFound, PolyfleetError
from workers.attempt.attempts import AttemptManager
from workers.checkpoint.exchange.change_stamps import Stamp, inside, stamp
from workers.errors import CheckpointError
from workers.processes.interpreter import interpreter
from workers.protocol.folders import read_json
from workers.protocol.messages import ScriptCheckpoint
from workers.protocol.output_folder import output_path
from workers.storage.pool_storage import PoolStorage

POLL_EVERY_S = 1.0
MAX_WAIT_S = 10.0
"""Maximum wait for a script to pause writing. Then a copy is made anyway, and dropped if files changed during it."""
PAUSE_FACTOR = 9.0
"""Pause after a copy, as a multiple of its duration."""
MAX_TEXT_LENGTH = 2000
"""Maximum length of the sentence for the job's record, as the names in it come from the script."""
LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _WatchedCheckpoint:
    """Checkpoint of one attempt.

    `polled`: its stamp at the last poll; `copied`: at the last copy; `changed_s`: when it first changed after that (0:
    it has not).
    """

    folder: Path
    path: str
    format: str
    polled: Stamp = ()
    copied: Stamp = ()
    changed_s: float = 0.0
    next_copy_s: float = 0.0


class ScriptCheckpoints:
    """Copies scripts' checkpoints on one node: those of attempts whose node rank 0, and files, are here."""

    def __init__(self, attempts: AttemptManager, storage: PoolStorage):
        self._attempts, self._storage = attempts, storage
        self._watched: dict[str, _WatchedCheckpoint | None] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        if attempts.live_attempts():  # started by an earlier agent
            self.start()

    def start(self) -> None:
        """Start the thread that copies. Called on first need: most nodes never run such a job."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll_loop, name="script checkpoints", daemon=True)
                self._thread.start()

    def choose_for(self, job: str, epoch: int, path: str, format: str, device: str, count: int) -> dict[str, Any]:  # noqa: A002
        """Choose the checkpoint for attempt `epoch` before it starts: {"found", "text"}.

        Does nothing if the attempt has started and may be writing. See workers/checkpoint/exchange/script_versions.py.
        """
        try:
            self._attempts.folder(job, epoch)
        except NotFound:
            folder = self._storage.make_folder(f"{job}/output-{epoch}")
            arguments = {"folder": str(folder), "path": path, "format": format, "device": device, "count": count}
            try:
                result = _run("hand_on", arguments)
            except CheckpointError as e:
                result = {"found": True, "text": f"{path} is passed on without a check: {e.message}"}
            return result | {"text": result["text"][:MAX_TEXT_LENGTH]}
        return {"found": False, "text": ""}

    def _poll_loop(self) -> None:
        """Poll for ever; a checkpoint that could not be copied is tried again when it has changed."""
        while True:
            time.sleep(POLL_EVERY_S)
            try:
                self.poll()
            except Exception:
                LOG.exception("checkpoints of scripts could not be checked")

    def poll(self) -> None:
        """Copy the checkpoints that have changed, one after another."""
        live = {str(attempt.id): attempt for attempt in self._attempts.live_attempts()}
        for key in self._watched.keys() - live.keys():
            del self._watched[key]
        for key, attempt in live.items():
            if key not in self._watched and (order := read_json(attempt.folder.order)) is not None:
                self._watched[key] = _checkpoint_of(order, attempt.id.epoch)
            if watched := self._watched.get(key):
                self._poll_one(key, watched)

    def _poll_one(self, key: str, checkpoint: _WatchedCheckpoint) -> None:
        started_s = time.monotonic()
        try:
            current = stamp(inside(checkpoint.folder, checkpoint.path))
        except CheckpointError:  # it leads through a link
            return
        is_settled = current == checkpoint.polled or 0 < checkpoint.changed_s < started_s - MAX_WAIT_S
        if current != checkpoint.polled:
            checkpoint.changed_s = checkpoint.changed_s or started_s
            checkpoint.polled = current
        if not current or current == checkpoint.copied or not is_settled or started_s < checkpoint.next_copy_s:
            return
        checkpoint.copied, checkpoint.changed_s = current, 0.0
        self._copy(key, checkpoint)
        checkpoint.next_copy_s = time.monotonic() + PAUSE_FACTOR * (time.monotonic() - started_s)

    def _copy(self, key: str, checkpoint: _WatchedCheckpoint) -> None:
        try:
            result = _run(
                "keep", {"folder": str(checkpoint.folder), "path": checkpoint.path, "format": checkpoint.format}
            )
        except PolyfleetError as e:
            result = {"kept": False, "why": e.message}
        if result["kept"]:
            LOG.info("attempt %s: saved a copy of %s", key, checkpoint.path)
        else:
            LOG.info("attempt %s: no copy of %s was saved: %s", key, checkpoint.path, result["why"])


def _checkpoint_of(order: Any, epoch: int) -> _WatchedCheckpoint | None:
    """Return the checkpoint to copy; None for an attempt without one."""
    if order["node_rank"] != 0 or not order["checkpoint_root"]:
        return None
    checkpoint = ScriptCheckpoint.of(order["task"], order["arguments"])
    return checkpoint and _WatchedCheckpoint(
        output_path(Path(order["checkpoint_root"]), epoch), checkpoint.path, checkpoint.format
    )


def _run(verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from workers.checkpoint.tools import run_in_child

    result: dict[str, Any] = run_in_child(verb, arguments, python=interpreter())
    return result
