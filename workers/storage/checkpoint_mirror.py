"""Checkpoints of a pool whose `storage` is an object store.

Jobs save on the node's own disk, without the store's credentials; this mirror uploads what was committed there, with
the credentials of the node's environment, in child processes. A checkpoint is in the store once its manifest is, which
is uploaded last. What is only in the store is listed as if it were here, and downloaded before it is read.
"""

import builtins
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from cluster.errors import NotFound, PolyfleetError, SpecError
from cluster.host import file_lock
from cluster.input import checkpoint_location
from cluster.paths import home, private_dir
from cluster.types import Finding
from workers.errors import CheckpointError
from workers.processes.interpreter import interpreter
from workers.storage.pool_checkpoints import PoolCheckpoints
from workers.storage.pool_storage import PoolStorage

log = logging.getLogger(__name__)

POLL_EVERY_S = 2.0
MAX_RETRY_S = 300.0
PAUSE_FACTOR = 20.0
"""Pause after a search of the disk for new checkpoints, as a multiple of its duration."""
HOLD_EVERY_S = 30.0
REMEDY = "check the node's network, its credentials for the store, and that the store's library is installed there"
Data = dict[str, Any]


class RunTool(Protocol):
    def __call__(self, verb: str, arguments: Data, progress: Callable[[int, int], None] | None = None) -> Any: ...


def run_in_pool_environment(verb: str, arguments: Data, progress: Callable[[int, int], None] | None = None) -> Any:
    """Run a checkpoint tool in a child process with the pool's Python."""
    from workers.checkpoint.tools import run_in_child

    return run_in_child(verb, arguments, progress, interpreter())


class CheckpointMirror(PoolCheckpoints):
    """Checkpoints on this node and below `uri`, with the methods of PoolCheckpoints.

    `keep_of` returns how many checkpoints a job keeps, None if this node does not know the job. Each method that lists
    raises FleetError if the store does not respond: what it has may be newer than what is here.
    """

    def __init__(
        self,
        storage: PoolStorage,
        pool: str,
        uri: str,
        keep_of: Callable[[str], int | None] = lambda job: None,
        run: RunTool = run_in_pool_environment,
    ):
        super().__init__(storage, pool)
        self.uri, self._keep_of, self._run = str(checkpoint_location.parse_uri(uri, "storage", _tested())), keep_of, run
        self._mark = f".stored-{hashlib.sha256(self.uri.encode()).hexdigest()[:8]}"
        self._rows: dict[str, Data] = {}
        self._damaged: dict[str, str] = {}
        self._retry_s: dict[Path, tuple[float, float]] = {}
        self._problem, self._has_access = "", False
        self._lock = threading.Lock()
        self._pending, self._is_counted, self._search = 0, False, threading.Event()

    # -- what is here or in the store

    def list(self, prefix: str) -> "list[Data]":
        stored = self._stored(prefix)
        here = [row | _pin_of(stored.pop(row["path"], {})) for row in super().list(prefix)]
        newest_first = sorted(here + list(stored.values()), key=lambda row: (row["step"], row["path"]), reverse=True)
        return sorted(newest_first, key=lambda row: str(PurePosixPath(row["path"]).parent))

    def resolve(self, path: str) -> Data:
        stored, error = self._stored(path), None
        try:
            here = super().resolve(path)
        except CheckpointError as e:
            here, error = {"path": "", "passed_over": []}, e
        if path in (here["path"], *stored):
            return {"path": path, "passed_over": []}
        below = [row for row in stored.values() if str(PurePosixPath(row["path"]).parent) == path]
        sound = [row for row in below if not row["problem"]]
        newest = max(sound, key=_order, default=None)
        if newest is not None and _step(newest["path"]) > _step(here["path"]):
            here = here | {"path": newest["path"]}
        elif error is not None:
            raise error
        elif below and not here["path"]:
            raise CheckpointError(f"no checkpoint in {self.uri}/{path} is sound: {below[0]['problem']}")
        newer = [row for row in below if row["problem"] and _step(row["path"]) > _step(here["path"])]
        return here | {"passed_over": [*here["passed_over"], *map(_passed_over, newer)]}

    def describe(self, path: str) -> Data:
        if self._is_here(path):
            return super().describe(path)
        row = self._stored_row(path)
        if "damaged" not in row:
            raise CheckpointError(row["problem"], "copy it again from its source")
        return {key: value for key, value in row.items() if key != "problem"}

    def verify(self, path: str) -> Data:
        if self._is_here(path):
            return super().verify(path)
        result: Data = self._run("verify", {"place": self._uri(path)})
        if not result["ok"]:
            self._damaged[path] = result["problems"][0]
            raise CheckpointError(result["problems"][0], "resume from an older checkpoint, or copy this one again")
        self._damaged.pop(path, None)
        return result | {"path": path}

    def hold(self, path: str) -> None:
        """Protect a checkpoint on this node from deletion; what is only in the store is not deleted from here."""
        if self._is_here(path):
            super().hold(path)
        else:
            self._stored_row(path)

    def _is_here(self, path: str) -> bool:
        from workers.checkpoint.format.manifest import NAME

        return self._storage.exists(path) and os.path.lexists(self._storage.resolve(path) / NAME)

    def _stored_row(self, path: str) -> Data:
        try:
            return self._stored(path)[path]
        except KeyError:
            raise NotFound(f"no checkpoint {path!r} on this node or in {self.uri}", "list its parent folder") from None

    def _stored(self, prefix: str) -> dict[str, Data]:
        """Rows of the checkpoints in the store at or below `prefix`. Manifests that were read before are cached."""
        root = str(PurePosixPath(prefix).parent) if prefix.rpartition("/")[2].startswith("step-") else prefix
        root = "" if root == "." else root
        with self._lock:
            cached = {path: row for path, row in self._rows.items() if _is_below(path, root)}
            relative = [path.removeprefix(f"{root}/") for path in cached]
            reply = self._run("stored", {"root": self._uri(root), "described": relative})
            rows = cached | {_join(root, row["path"]): row for row in reply["rows"]}
            pinned = {_join(root, name) for name in reply["pinned"]}
            rows = {
                path: rows[path] | {"path": path, "pinned": path in pinned}
                for path in (_join(root, name) for name in reply["paths"])
            }
            self._rows = {path: row for path, row in self._rows.items() if path not in cached} | rows
        damaged = {path: {"problem": reason, "damaged": reason} for path, reason in self._damaged.items()}
        return {path: row | damaged.get(path, {}) for path, row in rows.items() if _is_below(path, prefix)}

    def _uri(self, path: str) -> str:
        """The URI of a path. Raises SpecError for names that the store's library would take for a pattern."""
        return str(checkpoint_location.parse_uri(f"{self.uri}/{path}" if path else self.uri, "path", _tested()))

    # -- copies on this node

    def pin_copy(self, path: str, remove: bool) -> None:
        """Pin or unpin the copy of a checkpoint on this node, if there is one. The pin in the store is not changed."""
        from workers.checkpoint.disk.pins import pin, unpin

        if self._is_here(path):
            (unpin if remove else pin)(self._storage.resolve(path))

    def remove_old_copies(self, folder: str, oldest: str, stored: Collection[str]) -> tuple[str, ...]:
        """Remove copies on this node that were uploaded from `folder` and are older than `oldest` there, except those
        of checkpoints in `stored`, and pinned and held ones. Returns the names of those removed.
        """
        from workers.checkpoint.disk.files import Files
        from workers.checkpoint.disk.pins import is_held, is_pinned
        from workers.checkpoint.disk.retention import remove_checkpoint
        from workers.checkpoint.format.step_folders import newest_first, step_of

        if not self._storage.exists(folder):
            return ()
        oldest_step, removed = step_of(Path(oldest)), builtins.list[str]()
        for copy in newest_first(self._storage.resolve(folder)):
            is_old = step_of(copy) < oldest_step and copy.name not in stored
            if is_old and os.path.lexists(copy / self._mark) and not is_pinned(copy) and not is_held(copy):
                with suppress(OSError):  # the job's own `keep` may remove it, too
                    remove_checkpoint(Files(), copy)
                    removed.append(copy.name)
        return tuple(removed)

    # -- uploads

    @property
    def pending_uploads(self) -> int:
        """Number of checkpoints to upload; at least 1 while those of attempts that have ended are not counted yet."""
        return self._pending if self._is_counted else max(1, self._pending)

    def search_now(self) -> None:
        """Search for new checkpoints without a pause: an attempt has ended."""
        self._is_counted = False
        self._search.set()

    def start(self) -> None:
        """Start the thread that uploads."""
        threading.Thread(target=self._upload_loop, name="checkpoint uploads", daemon=True).start()

    def findings(self) -> tuple[Finding, ...]:
        """A finding while uploads fail."""
        problem = self._problem
        return (Finding("warning", "storage", problem, REMEDY),) if problem else ()

    def _upload_loop(self) -> None:
        pause_s = POLL_EVERY_S
        while True:
            try:
                search_s = self.upload_due()
                pause_s = max(POLL_EVERY_S, PAUSE_FACTOR * search_s)
            except Exception as e:  # the thread must not end
                log.exception("checkpoints were not uploaded to %s", self.uri)
                self._problem = self._problem_text(type(e).__name__)
                pause_s = MAX_RETRY_S
            self._search.wait(pause_s)
            self._search.clear()

    def upload_due(self) -> float:
        """Upload each committed checkpoint of this node that is not in the store, the newest of a job first.

        After an error, an upload is tried again with growing pauses; then only what is missing is sent. Returns the
        seconds that the search on this node took.
        """
        started_s, self._is_counted = time.monotonic(), True
        due = list(self._not_uploaded())
        search_s, self._pending = time.monotonic() - started_s, sum(map(self._has_valid_name, due))
        problem, newest = self._access_problem(), dict[Path, str]()
        for folder in due:
            due_s, pause_s = self._retry_s.get(folder, (0.0, POLL_EVERY_S))
            if time.monotonic() < due_s:
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
                self._retry_s[folder] = time.monotonic() + pause_s, min(2 * pause_s, MAX_RETRY_S)
        for root, name in newest.items():
            self._remove_expired(self._path(root), name)
        self._problem = problem
        return search_s

    def _access_problem(self) -> str:
        """Why the store cannot be listed, checked until it can be; "" if it can."""
        due_s, pause_s = self._retry_s.get(self._storage.root, (0.0, POLL_EVERY_S))
        if self._has_access or time.monotonic() < due_s:
            return "" if self._has_access else self._problem
        try:
            self._run("stored", {"root": self._uri(".access"), "described": []})
        except PolyfleetError as e:
            self._retry_s[self._storage.root] = time.monotonic() + pause_s, min(2 * pause_s, MAX_RETRY_S)
            return self._problem_text(str(e))
        self._has_access = True
        return ""

    def _problem_text(self, reason: str) -> str:
        return f"checkpoints are not uploaded to {self.uri}: {reason}"

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


def _tested() -> tuple[str, ...]:
    from workers.checkpoint.transfer.stores import IN_MEMORY

    return IN_MEMORY


def _join(root: str, path: str) -> str:
    return f"{root}/{path}" if root else path


def _is_below(path: str, root: str) -> bool:
    return not root or path == root or path.startswith(f"{root}/")


def _step(path: str) -> int:
    from workers.checkpoint.format.step_folders import step_of

    return step_of(Path(path)) if path else -1


def _pin_of(stored: Data) -> Data:
    """The pin of a checkpoint in the store, to add to the row of its copy on this node."""
    return {"pinned": True} if stored.get("pinned") else {}


def _order(row: Data) -> tuple[int, str]:
    return row["step"], row["created"]


def _passed_over(row: Data) -> dict[str, str]:
    return {"path": row["path"], "reason": row["problem"]}
