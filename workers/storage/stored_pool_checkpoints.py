"""Checkpoints on this node and in the object store of its pool, as one list.

What is only in the store is listed as if it were here, and downloaded before it is read.
"""

import builtins
import hashlib
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from cluster.errors import NotFound
from cluster.input import checkpoint_location
from workers.errors import CheckpointError
from workers.processes.interpreter import interpreter
from workers.storage.pool_checkpoints import PoolCheckpoints
from workers.storage.pool_storage import PoolStorage

Data = dict[str, Any]


class RunTool(Protocol):
    def __call__(self, verb: str, arguments: Data, progress: Callable[[int, int], None] | None = None) -> Any: ...


def run_in_pool_environment(verb: str, arguments: Data, progress: Callable[[int, int], None] | None = None) -> Any:
    """Run a checkpoint tool in a child process with the pool's Python."""
    from workers.checkpoint.tools import run_in_child

    return run_in_child(verb, arguments, progress, interpreter())


class StoredPoolCheckpoints(PoolCheckpoints):
    """Checkpoints on this node and below `uri`, with the methods of PoolCheckpoints.

    Each method that lists raises FleetError if the store does not respond: what it has may be newer than what is here.
    """

    def __init__(self, storage: PoolStorage, pool: str, uri: str, run: RunTool = run_in_pool_environment):
        super().__init__(storage, pool)
        self.uri, self._run = str(checkpoint_location.parse_uri(uri, "storage", tested_schemes())), run
        self._mark = f".stored-{hashlib.sha256(self.uri.encode()).hexdigest()[:8]}"
        self._rows: dict[str, Data] = {}
        self._damaged: dict[str, str] = {}
        self._lock = threading.Lock()

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
        return str(checkpoint_location.parse_uri(f"{self.uri}/{path}" if path else self.uri, "path", tested_schemes()))

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


def tested_schemes() -> tuple[str, ...]:
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
