"""Checkpoints in one pool's storage, by paths relative to it. Without torch; the reader is imported on first use.

Whoever writes into the storage writes the manifests. Small ones are read here, where that takes below 2 s and 128 MiB
whatever they say; larger ones by a process with limits of its own, since this is the agent's.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.errors import NotFound
from workers.errors import CheckpointError
from workers.storage import Storage


class StoredCheckpoints:
    def __init__(self, storage: Storage):
        self._storage = storage

    def list(self, prefix: str) -> "list[dict[str, Any]]":
        """Summaries of all checkpoints below `prefix` ("" for all), `path` relative to the storage."""
        from workers.checkpoint.format.folders import below

        if prefix and not self._storage.exists(prefix):
            return []
        root = self._storage.resolve(prefix)
        return [self._relative(row) for row in _read("list", {"root": str(root)}, below(root))]

    def step(self, path: str) -> str:
        """`path` itself if it is a checkpoint, the newest sound one directly below it if there is any, else "".

        Of a folder every byte of the newest is read: one that rotted must not end the job that could go on from the one
        before. Raises DamagedCheckpoint when there are some and none is sound.
        """
        from workers.checkpoint.format.folders import newest_first
        from workers.checkpoint.format.manifest import NAME

        if not self._storage.exists(path):
            return ""
        folder = self._storage.resolve(path)
        if (folder / NAME).is_file():
            return path
        found = _read("latest", {"root": str(folder)}, newest_first(folder))
        return f"{path}/{Path(found).name}" if found else ""

    def describe(self, path: str) -> "dict[str, Any]":
        folder = self._storage.resolve(path)
        return self._relative(_read("show", {"path": str(folder)}, [folder]))

    def verify(self, path: str) -> "dict[str, Any]":
        """Every byte against its hash. Raises CheckpointError with the first thing that is wrong."""
        folder = self._storage.resolve(path)
        found = _read("check", {"path": str(folder)}, [folder])
        if not found["ok"]:
            raise CheckpointError(found["problems"][0], "resume from an older checkpoint, or copy this one again")
        return self._relative(found)

    def plan(self, path: str, kind: str, count: int) -> "dict[str, Any]":
        """What would be converted, and what cannot follow, on devices of that kind. Raises NotFound."""
        if self.step(path) != path:
            raise NotFound(f"no checkpoint {path!r} in this pool's storage", "name a folder step-…")
        folder = self._storage.resolve(path)
        planned: dict[str, Any] = _read("plan", {"path": str(folder), "to": kind, "count": count}, [folder])
        return planned

    def _relative(self, row: "dict[str, Any]") -> "dict[str, Any]":
        path = self._storage.root.joinpath(row["path"]).relative_to(self._storage.root)
        return row | {"path": str(path)}


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
