"""Checkpoints in one pool's storage, by paths relative to it. Without torch; the reader is imported on first use."""

from typing import Any

from cluster.errors import NotFound
from workers.errors import CheckpointError
from workers.storage import Storage


class StoredCheckpoints:
    def __init__(self, storage: Storage):
        self._storage = storage

    def list(self, prefix: str) -> "list[dict[str, Any]]":
        """Summaries of all checkpoints below `prefix` ("" for all), `path` relative to the storage."""
        from workers.checkpoint.inspect import list_checkpoints

        if prefix and not self._storage.exists(prefix):
            return []
        return [self._relative(row) for row in list_checkpoints(self._storage.resolve(prefix))]

    def step(self, path: str) -> str:
        """`path` itself if it is a checkpoint, the newest sound one directly below it if there is any, else "".

        Of a folder every byte of the newest is read: one that rotted must not end the job that could go on from the one
        before. Raises DamagedCheckpoint when there are some and none is sound.
        """
        from workers.checkpoint.format.manifest import NAME
        from workers.checkpoint.inspect import latest

        if not self._storage.exists(path):
            return ""
        folder = self._storage.resolve(path)
        if (folder / NAME).is_file():
            return path
        found = latest(folder)
        return f"{path}/{found.path.name}" if found else ""

    def describe(self, path: str) -> "dict[str, Any]":
        from workers.checkpoint.inspect import describe

        return self._relative(describe(self._storage.resolve(path)))

    def verify(self, path: str) -> "dict[str, Any]":
        """Every byte against its hash. Raises CheckpointError with the first thing that is wrong."""
        from workers.checkpoint.inspect import verify

        found = verify(self._storage.resolve(path))
        if not found["ok"]:
            raise CheckpointError(found["problems"][0], "resume from an older checkpoint, or copy this one again")
        return self._relative(found)

    def plan(self, path: str, kind: str, count: int) -> "dict[str, Any]":
        """What would be converted, and what cannot follow, on devices of that kind. Raises NotFound."""
        from workers.checkpoint.inspect import plan

        if self.step(path) != path:
            raise NotFound(f"no checkpoint {path!r} in this pool's storage", "name a folder step-…")
        return plan(self._storage.resolve(path), kind, count)

    def _relative(self, row: "dict[str, Any]") -> "dict[str, Any]":
        path = self._storage.root.joinpath(row["path"]).relative_to(self._storage.root)
        return row | {"path": str(path)}
