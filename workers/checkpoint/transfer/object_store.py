"""Checkpoints straight into an object store, and from one.

There are no renames there: every object has a name of its own from the beginning, and the manifest, put last, makes it
a checkpoint. To be loaded, one is first copied to this machine.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from cluster.errors import NotFound, UserError
from cluster.paths import home, private_dir
from workers.checkpoint.disk.buffers import aligned
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.layout import Layout
from workers.checkpoint.disk.pins import PIN
from workers.checkpoint.disk.retention import remove_checkpoint
from workers.checkpoint.disk.writer import Arena, Progress
from workers.checkpoint.format import manifest
from workers.checkpoint.format.chunks import CHUNK_BYTES, chunk_digest
from workers.checkpoint.format.manifest import FOLDER, NAME, FileEntry, Manifest, Producer
from workers.checkpoint.format.manifest_checks import parse_manifest
from workers.checkpoint.format.step_folders import checkpoints_below
from workers.checkpoint.transfer.copier import ByteProgress, copy, verify_location
from workers.checkpoint.transfer.stores import FolderStore, ObjectStore, manifest_text, store
from workers.errors import CheckpointError

FETCHED_AGE_S = 86400


class ObjectStoreDestination:
    """A save into an object store."""

    def __init__(self, uri: str, name: str):
        self.root, self.path = uri, f"{uri.rstrip('/')}/{name}"
        self._root, self._name = objects(uri), name
        self._to = self._root.below(name)

    def refuse_older_attempt(self, producer: Producer) -> None:
        if not producer.job:
            return
        for name in _steps(self._root):
            try:
                other = parse_manifest(manifest_text(self._root.below(name)), name).producer
            except CheckpointError:
                continue  # a damaged one proves nothing
            if other.job == producer.job and other.epoch > producer.epoch:
                raise CheckpointError(
                    f"attempt {producer.epoch} of job {producer.job} may not save:"
                    f" attempt {other.epoch} has saved {name}",
                    "nothing to do: the job continues in a newer attempt",
                )

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()  # names are unique; there are no locks to take

    def begin(self, step: int, needed_bytes: int, producer: Producer) -> None:
        self.refuse_older_attempt(producer)

    def put(self, layouts: list[Layout], arena: Arena | None, progress: Progress | None) -> dict[str, FileEntry]:
        """One shard after the other, a chunk in memory at a time."""
        told = ByteProgress(sum(layout.size_bytes for layout in layouts), progress)
        written = {}
        for layout in layouts:
            digests: list[str] = []
            self._to.write(layout.file, _chunks(layout, arena, digests, told))
            written[layout.file] = FileEntry(layout.size_bytes, tuple(digests))
        return written

    def commit(self, described: Manifest) -> None:
        self._to.write(NAME, iter([manifest.dump(described)]))

    def undo(self) -> None:
        discard(self._to)

    def retain(self, keep: int) -> tuple[str, ...]:
        """Keep this one, once every byte of it was read back, and the `keep - 1` newest others; manifests go first."""
        others = [n for n in _steps(self._root) if n != self._name and not self._root.below(n).exists(PIN)]
        doomed = others[keep - 1 :]
        if doomed and (problems := verify_location(self.path)["problems"]):
            return (f"nothing older was deleted: {problems[0]}",)
        notes = []
        for name in doomed:
            try:
                self._root.below(name).remove(NAME)
                discard(self._root.below(name))
            except OSError as e:
                notes.append(f"{self.root}/{name} could not be deleted: {e}")
        return tuple(notes)


def objects(uri: str) -> ObjectStore:
    """Raises UserError for a scheme that is not an object store's."""
    found = store(uri)
    if isinstance(found, FolderStore):
        raise UserError(f"{uri} is a folder of this machine", f"name it as {found.path}")
    return found


def _chunks(layout: Layout, arena: Arena | None, digests: list[str], told: "ByteProgress") -> Iterator[bytes]:
    scratch = aligned(CHUNK_BYTES) if arena is None else None
    for index in range(layout.chunks):
        size_bytes = min(CHUNK_BYTES, layout.size_bytes - index * CHUNK_BYTES)
        if scratch is not None:
            layout.fill(index, scratch)
        data = scratch if scratch is not None else arena.chunk(layout, index)  # type: ignore[union-attr]
        digests.append(chunk_digest(data[:size_bytes]))
        yield bytes(data[:size_bytes])
        told.more(size_bytes)


def discard(to: ObjectStore) -> None:
    """Whatever was put before a save failed. It is no checkpoint in any case."""
    for name in to.names():
        with suppress(OSError, CheckpointError):
            to.remove(name)


def download(uri: str, step: "int | str" = "latest") -> Path:
    """A copy of the checkpoint on this machine, made or gone on with, below POLYFLEET_HOME/cache. What nobody asked for
    again within a day goes."""
    cache = home() / "cache" / "checkpoints"
    folder = private_dir(cache / hashlib.sha256(uri.encode()).hexdigest()[:16])
    place = uri
    if step != "latest":
        named = [name for name in _steps(objects(uri)) if int(name.split("-")[1]) == step]
        if not named:
            raise NotFound(f"no checkpoint of step {step} in {uri}", "`verify` names the newest there")
        place = f"{uri.rstrip('/')}/{named[0]}"
    path = Path(copy(place, folder)["target"])
    os.utime(path)
    _forget(cache)
    return path


def _forget(cache: Path) -> None:
    for folder in checkpoints_below(cache):
        with suppress(OSError):  # another process may forget it at the same time
            if time.time() - folder.stat().st_mtime > FETCHED_AGE_S:
                remove_checkpoint(Files(), folder)


def _steps(root: ObjectStore) -> list[str]:
    """Committed checkpoints, newest first."""
    found = [name for name in root.names() if FOLDER.fullmatch(name) and root.below(name).exists(NAME)]
    return sorted(found, key=lambda name: (int(name.split("-")[1]), name), reverse=True)
