"""Where a save writes: a local folder, or an object store (transfer/object_store.py)."""

import errno
import os
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

from workers.checkpoint.disk.commit import write_manifest, writer_lock
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.layout import Layout
from workers.checkpoint.disk.retention import PART, apply_retention, check_attempt_is_newest, remove_checkpoint
from workers.checkpoint.disk.writer import Arena, Progress, write_shards
from workers.checkpoint.format.manifest import FileEntry, Manifest, Producer, dump
from workers.errors import CheckpointError


class Destination(Protocol):
    """A checkpoint that is being written. Every rank has one; rank 0 calls all its methods, the others only `put`."""

    root: Any
    path: Any

    def check_attempt(self, producer: Producer) -> None:
        """Raises CheckpointError if a later attempt of the same job has saved."""

    def lock(self) -> AbstractContextManager[None]:
        """Return a lock to hold while writing. Raises Conflict while another process writes there."""

    def begin_save(self, step: int, needed_bytes: int, producer: Producer) -> None: ...

    def put(self, layouts: list[Layout], arena: Arena | None, progress: Progress | None) -> dict[str, FileEntry]: ...

    def commit(self, described: Manifest) -> None: ...

    def abort_save(self) -> None:
        """Remove everything that a failed save has written."""

    def apply_retention(self, keep: int) -> tuple[str, ...]: ...


class FolderDestination:
    """Write to a temporary folder, rename it, write the manifest last: saver.py explains the steps."""

    def __init__(self, root: Path, name: str, files: Files):
        self.root, self.path, self._staging = root, root / name, root / f"{PART}{name}"
        self._files = files

    def check_attempt(self, producer: Producer) -> None:
        check_attempt_is_newest(self.root, producer)

    def lock(self) -> AbstractContextManager[None]:
        return writer_lock(self.root)

    def begin_save(self, step: int, needed_bytes: int, producer: Producer) -> None:
        free_bytes = shutil.disk_usage(self.root).free
        if needed_bytes > free_bytes:
            raise CheckpointError(
                f"step {step} needs {needed_bytes:,} bytes, the disk of {self.root} has {free_bytes:,} free",
                "free disk space, or keep fewer checkpoints",
            ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root))
        check_attempt_is_newest(self.root, producer)  # again: a later attempt may have saved since the first check
        self._files.make_folder(self._staging)

    def put(self, layouts: list[Layout], arena: Arena | None, progress: Progress | None) -> dict[str, FileEntry]:
        return write_shards(self._files, self._staging, layouts, arena, progress)

    def commit(self, described: Manifest) -> None:
        self._files.sync_folder(self._staging)
        self._files.rename(self._staging, self.path)
        self._files.sync_folder(self.root)
        write_manifest(self._files, self.path, dump(described))

    def abort_save(self) -> None:
        for folder in (self._staging, self.path):
            with suppress(OSError):  # the save's own error is the one to report
                remove_checkpoint(self._files, folder)

    def apply_retention(self, keep: int) -> tuple[str, ...]:
        return apply_retention(self._files, self.root, keep, self.path)
