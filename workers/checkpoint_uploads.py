"""Checkpoints that other nodes send here, chunk by chunk, while one caller at a time looks after each."""

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import NamedTemporaryFile
from typing import Any

from cluster.errors import Conflict, FleetError, NotFound, UserError
from workers.pool_paths import errors_with_pool_paths
from workers.pool_storage import PoolStorage

IDLE_S = 60.0
"""After so long without a word from its sender a copy is taken for abandoned, unless whoever goes on with it says less.
"""


class CheckpointUploads:
    """`folder` is relative to the pool's storage, `name` a checkpoint's own. Kept between calls, not across a restart:
    what has arrived lies on disk, and the next `begin` finds it there.
    """

    def __init__(self, storage: PoolStorage, pool: str = ""):
        self._storage = storage
        self._roots = {storage.root: pool} if pool else {}
        self._open: dict[tuple[str, str], _Open] = {}
        self._lock = threading.Lock()

    def begin(self, folder: str, name: str, text: bytes, idle_s: float = IDLE_S) -> "dict[str, Any]":
        """{"arrived", "missing": [[file, index]], "step", "files", "bytes"} for the manifest `text`. Another copy of it
        that was silent for `idle_s` is taken for abandoned.

        Raises Conflict while another copy of it is under way, DamagedCheckpoint for what cannot be believed.
        """
        from workers.checkpoint.format.manifest import FOLDER
        from workers.checkpoint.transfer.receiver import CheckpointReceiver

        if not FOLDER.fullmatch(name):
            raise UserError(f"{name[:80]!r} is not a checkpoint's name", "a folder step-… is copied under its own name")
        self._close_idle((folder, name), idle_s)
        stack = ExitStack()
        checked = _expected(text)
        with errors_with_pool_paths(self._roots), _kept(name):
            incoming = stack.enter_context(CheckpointReceiver(self._storage.make(folder), name, text, expected=checked))
        manifest = incoming.manifest
        told: dict[str, Any] = {"arrived": incoming.arrived, "missing": [], "step": manifest.step}
        told |= {"files": len(manifest.files), "bytes": manifest.size_bytes()}
        if incoming.arrived:
            stack.close()
            return told
        try:
            with errors_with_pool_paths(self._roots), _kept(name):
                told["missing"] = [list(chunk) for chunk in incoming.missing()]
        except BaseException:
            stack.close()
            raise
        with self._lock:
            self._open[folder, name] = _Open(incoming, stack)
        return told

    def write(self, folder: str, name: str, file: str, index: int, data: bytes) -> int:
        """Raises DamagedCheckpoint where the chunk is not what the manifest says."""
        held = self._held(folder, name)
        digests = held.incoming.manifest.files[file].xxh3_128 if file in held.incoming.manifest.files else ()
        if not 0 <= index < len(digests):
            raise UserError(f"{name} has no chunk {index} of {file[:80]!r}", "send those that are missing")
        with held.lock, errors_with_pool_paths(self._roots), _kept(name):
            held.incoming.write((file, index), data)
        return len(data)

    def commit(self, folder: str, name: str) -> None:
        held = self._held(folder, name)
        with held.lock, errors_with_pool_paths(self._roots), _kept(name):
            held.incoming.commit()
        self.leave(folder, name)

    def leave(self, folder: str, name: str) -> None:
        """Done, or given up for now: what arrived stays for the next try."""
        with self._lock:
            held = self._open.pop((folder, name), None)
        if held is not None:
            with held.lock:
                held.stack.close()

    def _held(self, folder: str, name: str) -> "_Open":
        held = self._open.get((folder, name))
        if held is None:
            raise NotFound(f"no copy of {name} into {folder!r} is under way here", "begin it again")
        held.last_s = time.monotonic()
        return held

    def _close_idle(self, key: tuple[str, str], idle_s: float) -> None:
        held = self._open.get(key)
        if held is None:
            return
        if time.monotonic() - held.last_s < idle_s:
            raise Conflict(f"another copy of {key[1]} into {key[0]!r} is under way", "let it finish, then copy again")
        self.leave(*key)


class _Open:
    def __init__(self, incoming: Any, stack: ExitStack):
        self.incoming, self.stack = incoming, stack
        self.lock = threading.Lock()
        self.last_s = time.monotonic()


@contextmanager
def _kept(name: str) -> Iterator[None]:
    """Errors of the disk as ours: a full one above all."""
    try:
        yield
    except OSError as e:
        remedy = "look at that disk, and copy again: what arrived is kept"
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free space there, and copy again: what arrived is kept"
        raise FleetError(f"{name} cannot be kept in this pool's storage: {e.strerror or e}", remedy) from e


def _expected(text: bytes) -> Any:
    """What a large manifest says, read by a process with limits of its own; None for a small one, which is read here.

    Raises DamagedCheckpoint.
    """
    from workers.checkpoint.format.manifest import LARGEST_BYTES, SMALL_BYTES, DamagedCheckpoint
    from workers.checkpoint.tools import run_in_child
    from workers.checkpoint.transfer.expected import expected_from

    if len(text) <= SMALL_BYTES:
        return None
    if len(text) > LARGEST_BYTES:
        raise DamagedCheckpoint(f"a manifest of {len(text)} bytes, at most {LARGEST_BYTES} are read")
    with NamedTemporaryFile(prefix="polyfleet-manifest-") as file:
        file.write(text)
        file.flush()
        return expected_from(run_in_child("incoming", {"path": file.name}))
