"""Checkpoints of a pool whose `storage` is an object store: what this node saves is uploaded.

Jobs save on the node's own disk, without the store's credentials; this mirror uploads what was committed there, with
the credentials of the node's environment, in child processes. A checkpoint is in the store once its manifest is, which
is uploaded last.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from cluster.errors import PolyfleetError, SpecError
from cluster.host import file_lock
from cluster.paths import home, private_dir
from workers.storage.pool_storage import PoolStorage
from workers.storage.stored_pool_checkpoints import RunTool, StoredPoolCheckpoints, run_in_pool_environment
from workers.storage.upload_loop import UploadLoop

log = logging.getLogger(__name__)

HOLD_EVERY_S = 30.0


class CheckpointMirror(UploadLoop, StoredPoolCheckpoints):
    """Checkpoints on this node and below `uri`, and the thread that uploads the former.

    `keep_of` returns how many checkpoints a job keeps, None if this node does not know the job.
    """

    def __init__(
        self,
        storage: PoolStorage,
        pool: str,
        uri: str,
        keep_of: Callable[[str], int | None] = lambda job: None,
        run: RunTool = run_in_pool_environment,
    ):
        StoredPoolCheckpoints.__init__(self, storage, pool, uri, run)
        UploadLoop.__init__(self, "checkpoints")
        self._keep_of, self._has_access = keep_of, False

    def upload_due(self) -> float:
        """Upload each committed checkpoint of this node that is not in the store, the newest of a job first.

        After an error, an upload is tried again with growing pauses; then only what is missing is sent. Returns the
        seconds that the search on this node took.
        """
        started_s, request = time.monotonic(), self._request
        due = list(self._not_uploaded())
        search_s = time.monotonic() - started_s
        self._set_pending(sum(map(self._has_valid_name, due)), request)
        problem, newest = self._access_problem(), dict[Path, str]()
        for folder in due:
            if not self._may_try(folder):
                problem = problem or self._problem
                continue
            try:
                self._upload(folder)
                newest.setdefault(folder.parent, folder.name)
                self._retry_s.pop(folder, None)
                self._pending -= 1
            except (PolyfleetError, OSError) as e:
                if not folder.is_dir():  # `keep` removed it
                    self._pending -= 1
                    continue
                problem = self._problem_text(str(e))
                log.warning("%s was not uploaded to %s: %s", folder.name, self.uri, e)
                self._postpone(folder)
        for root, name in newest.items():
            self._remove_expired(self._path(root), name)
        self._problem = problem
        return search_s

    def _access_problem(self) -> str:
        """Why the store cannot be listed, checked until it can be; "" if it can."""
        if self._has_access or not self._may_try(self._storage.root):
            return "" if self._has_access else self._problem
        try:
            self._run("stored", {"root": self._uri(".access"), "described": []})
        except PolyfleetError as e:
            self._postpone(self._storage.root)
            return self._problem_text(str(e))
        self._has_access = True
        return ""

    def _not_uploaded(self) -> Iterator[Path]:
        from workers.checkpoint.disk.damage_marks import damage_reason
        from workers.checkpoint.format.step_folders import checkpoints_below

        below = checkpoints_below(self._storage.root)
        return (f for f in below if not os.path.lexists(f / self._mark) and not damage_reason(f))

    def _has_valid_name(self, folder: Path) -> bool:
        """Whether the store accepts the name of a checkpoint; others are never uploaded."""
        try:
            return bool(self._uri(self._path(folder)))
        except SpecError:
            return False

    def _upload(self, folder: Path) -> None:
        from workers.checkpoint.disk.pins import hold, is_held, is_pinned, release

        held_s, hold_time_ns = float("-inf"), 0

        def keep_held(_done: int = 0, _total: int = 0) -> None:
            nonlocal held_s, hold_time_ns
            if time.monotonic() - held_s > HOLD_EVERY_S:
                held_s = time.monotonic()
                hold_time_ns = hold(folder)

        with file_lock.exclusive(self._lock_path(), lambda: None):  # other nodes may share this folder
            if os.path.lexists(folder / self._mark):
                return
            is_held_by_others = is_held(folder)
            keep_held()
            if is_pinned(folder):
                self._run("pin_stored", {"path": self._uri(self._path(folder))})
            self._run("copy", {"source": str(folder), "target": self._uri(self._path(folder.parent))}, keep_held)
            os.close(os.open(folder / self._mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            if not is_held_by_others:
                release(folder, hold_time_ns)

    def _lock_path(self) -> Path:
        """Lock of uploads from this folder. It is not in the folder, where jobs may put links."""
        name = hashlib.sha256(str(self._storage.root).encode()).hexdigest()[:16]
        return private_dir(home() / "upload-locks") / name

    def _remove_expired(self, job: str, newest: str) -> None:
        keep = self._keep_of(job)
        if keep is not None:
            with suppress(PolyfleetError):  # the next upload removes them
                self._run("retain", {"root": self._uri(job), "keep": keep, "newest": newest})

    def _path(self, folder: Path) -> str:
        path = folder.relative_to(self._storage.root)
        return "" if path == Path() else path.as_posix()
