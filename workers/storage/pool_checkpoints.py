"""Checkpoints in one pool's storage, by paths relative to it.

Imports no torch, and the reader on first use.

Manifests are untrusted, as any job can write into the storage. Small ones are read in this process, the agent's, which
takes less than 2 s and 128 MiB whatever they contain; larger ones by a child process with resource limits.
"""

import builtins
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.errors import FleetError, NotFound
from workers.errors import CheckpointError
from workers.storage.pool_paths import errors_with_pool_paths, with_pool_paths
from workers.storage.pool_storage import PoolStorage


class PoolCheckpoints:
    """Checkpoints of one storage. `pool` is its name for users: errors name locations in it as POOL:PATH."""

    def __init__(self, storage: PoolStorage, pool: str = ""):
        self._storage = storage
        self._roots = {storage.root: pool} if pool else {}

    def list(self, prefix: str) -> "list[dict[str, Any]]":
        """Return summaries of all checkpoints below `prefix` ("" for all), with paths relative to the storage."""
        from workers.checkpoint.format.step_folders import checkpoints_below

        if prefix and not self._storage.exists(prefix):
            return []
        root = self._storage.resolve(prefix)
        with errors_with_pool_paths(self._roots):
            return [self._relative(row) for row in _read("list", {"root": str(root)}, checkpoints_below(root))]

    def resolve(self, path: str) -> "dict[str, Any]":
        """Resolve `path`: a checkpoint, or a folder, for its newest checkpoint without a damage mark.

        Returns {"path": "" if there is none, "passed_over": [{"path", "reason"}]}. Reads manifests and sizes but no
        tensors: loading verifies these. Raises DamagedCheckpoint if all checkpoints are damaged.
        """
        from workers.checkpoint.format.manifest import NAME
        from workers.checkpoint.format.step_folders import newest_first

        if not self._storage.exists(path):
            return {"path": "", "passed_over": []}
        folder = self._storage.resolve(path)
        if (folder / NAME).is_file():
            return {"path": path, "passed_over": []}
        with errors_with_pool_paths(self._roots):
            resolved = _read("newest", {"root": str(folder)}, newest_first(folder))
        result: dict[str, Any] = with_pool_paths(resolved, self._roots)
        return result | {"path": f"{path}/{Path(resolved['path']).name}" if resolved["path"] else ""}

    def hold(self, path: str) -> None:
        """Protect a checkpoint from deletion while it is copied: see workers/checkpoint/disk/pins.py."""
        from workers.checkpoint.disk.pins import hold

        try:
            hold(self._storage.resolve(path))
        except OSError as e:
            raise FleetError(
                f"checkpoint {path!r} cannot be protected from deletion during its copy: {e.strerror}"
            ) from None

    def damaged(self) -> "builtins.list[dict[str, str]]":
        """Return {"path", "reason"} of all checkpoints that are marked as damaged, without reading manifests."""
        from workers.checkpoint.disk.damage_marks import damaged_checkpoints

        root = self._storage.root
        return [{"path": str(folder.relative_to(root)), "reason": with_pool_paths(reason, self._roots)}
                for folder, reason in damaged_checkpoints(root)]  # fmt: skip

    def describe(self, path: str) -> "dict[str, Any]":
        folder = self._storage.resolve(path)
        with errors_with_pool_paths(self._roots):
            return self._relative(_read("show", {"path": str(folder)}, [folder]))

    def verify(self, path: str) -> "dict[str, Any]":
        """Check every byte against its hash; set or remove the damage mark accordingly.

        Raises CheckpointError with the first problem.
        """
        from workers.checkpoint.disk.damage_marks import record_verification

        folder = self._storage.resolve(path)
        with errors_with_pool_paths(self._roots):
            verification = _read("check", {"path": str(folder)}, [folder])
            record_verification(folder, verification["problems"])
            if not verification["ok"]:
                raise CheckpointError(
                    verification["problems"][0], "resume from an older checkpoint, or copy this one again"
                )
        return self._relative(verification)

    def plan(self, path: str, kind: str, count: int) -> "dict[str, Any]":
        """Plan a move to devices of that kind: what would be converted, and what cannot move. Raises NotFound."""
        if self.resolve(path)["path"] != path:
            raise NotFound(f"no checkpoint {path!r} in this pool's storage", "name a folder step-…")
        folder = self._storage.resolve(path)
        with errors_with_pool_paths(self._roots):
            plan = _read("plan", {"path": str(folder), "to": kind, "count": count}, [folder])
        result: dict[str, Any] = with_pool_paths(plan, self._roots)
        return result

    def _relative(self, row: "dict[str, Any]") -> "dict[str, Any]":
        path = self._storage.root.joinpath(row["path"]).relative_to(self._storage.root)
        result: dict[str, Any] = with_pool_paths(row, self._roots)
        return result | {"path": str(path)}


def _read(verb: str, arguments: "dict[str, Any]", folders: Iterable[Path]) -> Any:
    """Run a tool that reads the manifests of `folders`: in this process, or in a child if one is large."""
    from workers.checkpoint.tools import run, run_in_child

    return (run_in_child if any(map(_is_large, folders)) else run)(verb, arguments)


def _is_large(folder: Path) -> bool:
    from workers.checkpoint.format.manifest import MAX_INLINE_BYTES, NAME

    try:
        return os.lstat(folder / NAME).st_size > MAX_INLINE_BYTES
    except OSError:
        return False
