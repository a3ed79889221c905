"""Checkpoints in one pool's storage, by paths relative to it. Without torch; the reader is imported on first use.

Whoever writes into the storage writes the manifests. Small ones are read here, where that takes below 2 s and 128 MiB
whatever they say; larger ones by a process with limits of its own, since this is the agent's.
"""

import builtins
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.errors import NotFound
from workers.errors import CheckpointError
from workers.pool_paths import errors_with_pool_paths, with_pool_paths
from workers.pool_storage import PoolStorage


class PoolCheckpoints:
    """`pool` is what users call the storage: errors name places in it as POOL:PATH."""

    def __init__(self, storage: PoolStorage, pool: str = ""):
        self._storage = storage
        self._roots = {storage.root: pool} if pool else {}

    def list(self, prefix: str) -> "list[dict[str, Any]]":
        """Summaries of all checkpoints below `prefix` ("" for all), `path` relative to the storage."""
        from workers.checkpoint.format.step_folders import checkpoints_below

        if prefix and not self._storage.exists(prefix):
            return []
        root = self._storage.resolve(prefix)
        with errors_with_pool_paths(self._roots):
            return [self._relative(row) for row in _read("list", {"root": str(root)}, checkpoints_below(root))]

    def step(self, path: str) -> "dict[str, Any]":
        """`path` itself if it is a checkpoint, else the newest one directly below it that is not known to be damaged:
        {"path", "passed_over": [{"path", "reason"}]}, "" where there is none.

        Manifests and sizes are read, and no tensor: who loads it proves its bytes. Raises DamagedCheckpoint when there
        are some and none is left.
        """
        from workers.checkpoint.format.manifest import NAME
        from workers.checkpoint.format.step_folders import newest_first

        if not self._storage.exists(path):
            return {"path": "", "passed_over": []}
        folder = self._storage.resolve(path)
        if (folder / NAME).is_file():
            return {"path": path, "passed_over": []}
        with errors_with_pool_paths(self._roots):
            found = _read("newest", {"root": str(folder)}, newest_first(folder))
        told: dict[str, Any] = with_pool_paths(found, self._roots)
        return told | {"path": f"{path}/{Path(found['path']).name}" if found["path"] else ""}

    def damaged(self) -> "builtins.list[dict[str, str]]":
        """{"path", "reason"} of all that are marked as damaged, without reading any manifest."""
        from workers.checkpoint.disk.damage_marks import damaged_checkpoints

        root = self._storage.root
        return [{"path": str(folder.relative_to(root)), "reason": with_pool_paths(why, self._roots)}
                for folder, why in damaged_checkpoints(root)]  # fmt: skip

    def describe(self, path: str) -> "dict[str, Any]":
        folder = self._storage.resolve(path)
        with errors_with_pool_paths(self._roots):
            return self._relative(_read("show", {"path": str(folder)}, [folder]))

    def verify(self, path: str) -> "dict[str, Any]":
        """Every byte against its hash. One that is not sound is marked, and one that is loses its mark.

        Raises CheckpointError with the first thing that is wrong.
        """
        from workers.checkpoint.disk.damage_marks import record_verification

        folder = self._storage.resolve(path)
        with errors_with_pool_paths(self._roots):
            found = _read("check", {"path": str(folder)}, [folder])
            record_verification(folder, found["problems"])
            if not found["ok"]:
                raise CheckpointError(found["problems"][0], "resume from an older checkpoint, or copy this one again")
        return self._relative(found)

    def plan(self, path: str, kind: str, count: int) -> "dict[str, Any]":
        """What would be converted, and what cannot follow, on devices of that kind. Raises NotFound."""
        if self.step(path)["path"] != path:
            raise NotFound(f"no checkpoint {path!r} in this pool's storage", "name a folder step-…")
        folder = self._storage.resolve(path)
        with errors_with_pool_paths(self._roots):
            planned = _read("plan", {"path": str(folder), "to": kind, "count": count}, [folder])
        told: dict[str, Any] = with_pool_paths(planned, self._roots)
        return told

    def _relative(self, row: "dict[str, Any]") -> "dict[str, Any]":
        path = self._storage.root.joinpath(row["path"]).relative_to(self._storage.root)
        told: dict[str, Any] = with_pool_paths(row, self._roots)
        return told | {"path": str(path)}


def _read(verb: str, arguments: "dict[str, Any]", folders: Iterable[Path]) -> Any:
    """Run a tool that reads the manifests of `folders`: here, or in a process of its own where one of them is large."""
    from workers.checkpoint.tools import run, run_in_child

    return (run_in_child if any(map(_is_large, folders)) else run)(verb, arguments)


def _is_large(folder: Path) -> bool:
    from workers.checkpoint.format.manifest import NAME, SMALL_BYTES

    try:
        return os.lstat(folder / NAME).st_size > SMALL_BYTES
    except OSError:
        return False
