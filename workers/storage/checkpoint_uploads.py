"""Receive checkpoints from other nodes, chunk by chunk; each from one sender at a time."""

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import NamedTemporaryFile
from typing import Any

from cluster.errors import Conflict, FleetError, NotFound, UserError
from workers.storage.pool_paths import errors_with_pool_paths
from workers.storage.pool_storage import PoolStorage

IDLE_TIMEOUT_S = 60.0
"""Time without a call of the sender after which a copy counts as abandoned; the next sender may set a shorter one."""


class CheckpointUploads:
    """Open uploads. `folder` is relative to the pool's storage, `name` is that of the checkpoint's folder.

    After a restart uploads must begin again, but data that has arrived is on disk, and `begin` finds it.
    """

    def __init__(self, storage: PoolStorage, pool: str = ""):
        self._storage = storage
        self._roots = {storage.root: pool} if pool else {}
        self._open: dict[tuple[str, str], _Upload] = {}
        self._lock = threading.Lock()

    def begin(self, folder: str, name: str, text: bytes, idle_s: float = IDLE_TIMEOUT_S) -> "dict[str, Any]":
        """Begin an upload by its manifest `text`.

        Returns {"arrived", "missing": [[file, index]], "step", "files", "bytes"}. Raises Conflict while the checkpoint
        is being copied by another sender, unless that was silent for `idle_s`; DamagedCheckpoint for an invalid
        manifest.
        """
        from workers.checkpoint.format.manifest import FOLDER
        from workers.checkpoint.transfer.receiver import CheckpointReceiver

        if not FOLDER.fullmatch(name):
            raise UserError(f"{name[:80]!r} is not a checkpoint's name", "copy a folder step-… under its own name")
        self._close_idle((folder, name), idle_s)
        stack = ExitStack()
        expected = _read_large_manifest(text)
        with errors_with_pool_paths(self._roots), _disk_errors(name):
            receiver = stack.enter_context(
                CheckpointReceiver(self._storage.make_folder(folder), name, text, expected=expected)
            )
        manifest = receiver.manifest
        summary: dict[str, Any] = {"arrived": receiver.is_complete, "missing": [], "step": manifest.step}
        summary |= {"files": len(manifest.files), "bytes": manifest.size_bytes()}
        if receiver.is_complete:
            stack.close()
            return summary
        try:
            with errors_with_pool_paths(self._roots), _disk_errors(name):
                summary["missing"] = [list(chunk) for chunk in receiver.missing()]
        except BaseException:
            stack.close()
            raise
        with self._lock:
            self._open[folder, name] = _Upload(receiver, stack)
        return summary

    def write(self, folder: str, name: str, file: str, index: int, data: bytes) -> int:
        """Write one chunk; return its bytes. Raises DamagedCheckpoint if it does not match the manifest."""
        upload = self._upload(folder, name)
        digests = upload.receiver.manifest.files[file].xxh3_128 if file in upload.receiver.manifest.files else ()
        if not 0 <= index < len(digests):
            raise UserError(
                f"{name} has no chunk {index} of {file[:80]!r}", "send only chunks of the list of missing ones"
            )
        with upload.lock, errors_with_pool_paths(self._roots), _disk_errors(name):
            upload.receiver.write((file, index), data)
        return len(data)

    def commit(self, folder: str, name: str) -> None:
        upload = self._upload(folder, name)
        with upload.lock, errors_with_pool_paths(self._roots), _disk_errors(name):
            upload.receiver.commit()
        self.close(folder, name)

    def close(self, folder: str, name: str) -> None:
        """Close an upload that is complete or interrupted. Data that has arrived stays for the next try."""
        with self._lock:
            upload = self._open.pop((folder, name), None)
        if upload is not None:
            with upload.lock:
                upload.stack.close()

    def _upload(self, folder: str, name: str) -> "_Upload":
        upload = self._open.get((folder, name))
        if upload is None:
            raise NotFound(f"no copy of {name} into {folder!r} is running on this node", "start the copy again")
        upload.last_call_s = time.monotonic()
        return upload

    def _close_idle(self, key: tuple[str, str], idle_s: float) -> None:
        upload = self._open.get(key)
        if upload is None:
            return
        if time.monotonic() - upload.last_call_s < idle_s:
            raise Conflict(
                f"another copy of {key[1]} into {key[0]!r} is running",
                "wait until it has finished, then copy again",
            )
        self.close(*key)


class _Upload:
    def __init__(self, incoming: Any, stack: ExitStack):
        self.receiver, self.stack = incoming, stack
        self.lock = threading.Lock()
        self.last_call_s = time.monotonic()


@contextmanager
def _disk_errors(name: str) -> Iterator[None]:
    """Convert errors of the disk, above all of a full one, into FleetError."""
    try:
        yield
    except OSError as e:
        remedy = "check that node's disk, then copy again: only missing data is transferred"
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free disk space on that node, then copy again: only missing data is transferred"
        raise FleetError(f"{name} cannot be written to this pool's storage: {e.strerror or e}", remedy) from e


def _read_large_manifest(text: bytes) -> Any:
    """Read a large manifest in a child process with resource limits; None for a small one, read here.

    Raises DamagedCheckpoint.
    """
    from workers.checkpoint.format.manifest import MAX_INLINE_BYTES, MAX_MANIFEST_BYTES, DamagedCheckpoint
    from workers.checkpoint.tools import run_in_child
    from workers.checkpoint.transfer.expected import expected_from

    if len(text) <= MAX_INLINE_BYTES:
        return None
    if len(text) > MAX_MANIFEST_BYTES:
        raise DamagedCheckpoint(f"the manifest has {len(text)} bytes, the maximum is {MAX_MANIFEST_BYTES}")
    with NamedTemporaryFile(prefix="polyfleet-manifest-") as file:
        file.write(text)
        file.flush()
        return expected_from(run_in_child("incoming", {"path": file.name}))
