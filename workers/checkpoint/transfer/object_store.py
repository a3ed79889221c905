"""Save checkpoints into an object store, and download them from one.

Object stores have no rename: every object gets a unique name, and the manifest, put last, makes the objects a
checkpoint. To be loaded, a checkpoint is first copied to this machine.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from cluster.errors import NotFound, UserError
from cluster.paths import home, private_dir
from workers.checkpoint.disk.files import Files, allocate_aligned
from workers.checkpoint.disk.layout import Layout
from workers.checkpoint.disk.retention import remove_checkpoint
from workers.checkpoint.disk.writer import Arena, ByteProgress, Progress
from workers.checkpoint.format import manifest
from workers.checkpoint.format.manifest import CHUNK_BYTES, FOLDER, NAME, FileEntry, Manifest, Producer, chunk_digest
from workers.checkpoint.format.manifest_checks import parse_manifest
from workers.checkpoint.format.step_folders import checkpoints_below
from workers.checkpoint.transfer.copier import copy, verify_location
from workers.checkpoint.transfer.stored_marks import delete_objects, is_protected
from workers.checkpoint.transfer.stores import FolderStore, ObjectStore, manifest_text, store
from workers.errors import CheckpointError

CACHE_AGE_S = 86400


class ObjectStoreDestination:
    """Destination of a save into an object store."""

    def __init__(self, uri: str, name: str):
        self.root, self.path = uri, f"{uri.rstrip('/')}/{name}"
        self._root, self._name = open_objects(uri), name
        self._objects = self._root.checkpoints_below(name)

    def check_attempt(self, producer: Producer) -> None:
        if not producer.job:
            return
        for name in _checkpoint_names(self._root):
            try:
                other = parse_manifest(manifest_text(self._root.checkpoints_below(name)), name).producer
            except CheckpointError:
                continue  # a damaged manifest does not show that this attempt was replaced
            if other.job == producer.job and other.epoch > producer.epoch:
                raise CheckpointError(
                    f"attempt {producer.epoch} of job {producer.job} may not save:"
                    f" attempt {other.epoch} has saved {name}",
                    "nothing to do: the job continues in a newer attempt",
                )

    def lock(self) -> AbstractContextManager[None]:
        return nullcontext()  # object stores have no locks, and names are unique

    def begin_save(self, step: int, needed_bytes: int, producer: Producer) -> None:
        self.check_attempt(producer)

    def put(self, layouts: list[Layout], arena: Arena | None, progress: Progress | None) -> dict[str, FileEntry]:
        """Upload one shard after the other, with one chunk in memory at a time."""
        counter = ByteProgress(sum(layout.size_bytes for layout in layouts), progress)
        written = {}
        for layout in layouts:
            digests: list[str] = []
            self._objects.write(layout.file, _chunks(layout, arena, digests, counter))
            written[layout.file] = FileEntry(layout.size_bytes, tuple(digests))
        return written

    def commit(self, content: Manifest) -> None:
        self._objects.write(NAME, iter([manifest.dump(content)]))

    def abort_save(self) -> None:
        remove_objects(self._objects)

    def apply_retention(self, keep: int) -> tuple[str, ...]:
        """Keep this checkpoint, after every byte of it was read back, and the `keep - 1` newest others.
        Pinned ones stay.
        """
        others = [
            n
            for n in _checkpoint_names(self._root)
            if n != self._name and not is_protected(objects := self._root.checkpoints_below(n), objects.names())
        ]
        expired = others[keep - 1 :]
        if expired and (problems := verify_location(self.path)["problems"]):
            return (f"nothing older was deleted: {problems[0]}",)
        notes = []
        for name in expired:
            try:
                delete_objects(self._root.checkpoints_below(name))
            except CheckpointError as e:
                notes.append(f"{self.root}/{name} could not be deleted: {e.message}")
        return tuple(notes)


def open_objects(uri: str) -> ObjectStore:
    """Open an object store. Raises UserError for any other scheme."""
    target = store(uri)
    if isinstance(target, FolderStore):
        raise UserError(f"{uri} is a folder of this machine", f"write the path {target.path}")
    return target


def _chunks(layout: Layout, arena: Arena | None, digests: list[str], counter: ByteProgress) -> Iterator[bytes]:
    scratch = allocate_aligned(CHUNK_BYTES) if arena is None else None
    for index in range(layout.chunks):
        size_bytes = min(CHUNK_BYTES, layout.size_bytes - index * CHUNK_BYTES)
        if scratch is not None:
            layout.fill(index, scratch)
        data = scratch if scratch is not None else arena.chunk(layout, index)  # type: ignore[union-attr]
        digests.append(chunk_digest(data[:size_bytes]))
        yield bytes(data[:size_bytes])
        counter.add(size_bytes)


def remove_objects(objects: ObjectStore) -> None:
    """Remove what was put before a save failed. Without a manifest it is not a checkpoint."""
    for name in objects.names():
        with suppress(OSError, CheckpointError):
            objects.remove(name)


def download(uri: str, step: "int | str" = "latest") -> Path:
    """Copy the checkpoint to this machine, below POLYFLEET_HOME/cache, or resume such a copy.
    Copies that were not used for a day are removed.
    """
    cache = home() / "cache" / "checkpoints"
    folder = private_dir(cache / hashlib.sha256(uri.encode()).hexdigest()[:16])
    location = uri
    if step != "latest":
        names = [name for name in _checkpoint_names(open_objects(uri)) if int(name.split("-")[1]) == step]
        if not names:
            raise NotFound(f"no checkpoint of step {step} in {uri}", "run `verify` on it to see the newest step")
        location = f"{uri.rstrip('/')}/{names[0]}"
    path = Path(copy(location, folder)["target"])
    os.utime(path)
    _remove_unused(cache)
    return path


def _remove_unused(cache: Path) -> None:
    for folder in checkpoints_below(cache):
        with suppress(OSError):  # another process may remove it at the same time
            if time.time() - folder.stat().st_mtime > CACHE_AGE_S:
                remove_checkpoint(Files(), folder)


def _checkpoint_names(root: ObjectStore) -> list[str]:
    """Names of committed checkpoints, newest first."""
    names = [name for name in root.names() if FOLDER.fullmatch(name) and root.checkpoints_below(name).exists(NAME)]
    return sorted(names, key=lambda name: (int(name.split("-")[1]), name), reverse=True)
