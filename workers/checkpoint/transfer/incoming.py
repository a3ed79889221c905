"""A checkpoint on its way into a folder: what is there already, what is missing, and the commit once all is.

    .incoming-step-…/      chunks are written at their places, each against its hash; what a cut left is used for a week
    step-…/                the same folder under its name, once every byte was read back and verified; manifest last

Chunks that another checkpoint of the same folder holds (frozen layers, an earlier copy) are taken from there.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cluster.errors import Conflict
from cluster.untrusted import Unreadable, opened, read_bytes
from workers.checkpoint.disk.damage import note_verified
from workers.checkpoint.disk.files import Files, write_file
from workers.checkpoint.disk.pins import is_pinned, pin
from workers.checkpoint.disk.reader import Chunk, read_at
from workers.checkpoint.disk.retention import INCOMING, first_fault
from workers.checkpoint.format.checks import open_regular, parse_manifest, read_json, read_manifest
from workers.checkpoint.format.chunks import CHUNK_BYTES, chunk_count, chunk_digest
from workers.checkpoint.format.folders import newest_first
from workers.checkpoint.format.manifest import LARGEST_BYTES, NAME, SMALL_BYTES, DamagedCheckpoint, FileEntry, Manifest
from workers.errors import CheckpointError

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Expected:
    """What is to arrive, as its manifest says. `digest` is the manifest's own."""

    step: int
    digest: str
    files: dict[str, FileEntry]

    def size_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def expected(path: str) -> dict[str, Any]:
    """An Expected as plain data, of the manifest at `path`, with all checks: for a process of its own."""
    manifest = parse_manifest(read_bytes(Path(path), LARGEST_BYTES), path)
    files = {name: [file.bytes, file.xxh3_128] for name, file in manifest.files.items()}
    return {"step": manifest.step, "digest": manifest.digest, "files": files}


def expected_from(told: dict[str, Any]) -> Expected:
    """What `expected` told."""
    files = {name: FileEntry(size_bytes, tuple(digests)) for name, (size_bytes, digests) in told["files"].items()}
    return Expected(told["step"], told["digest"], files)


def _described(manifest: Manifest) -> Expected:
    return Expected(manifest.step, manifest.digest, manifest.files)


class Incoming:
    """For use in a `with`: one process writes an incoming checkpoint at a time. Raises Conflict for a second one."""

    def __init__(
        self, root: Path, name: str, text: bytes, files: Files | None = None, expected: Expected | None = None
    ):
        """`expected` is what the manifest `text` says, where it was read and checked elsewhere."""
        self.root, self.name, self.text = root, name, text
        self.manifest = expected or _described(parse_manifest(text, f"{name}/{NAME}"))
        self.folder, self.final = root / f"{INCOMING}{name}", root / name
        self._files = files or Files()
        self._descriptors: dict[str, int] = {}
        self._lock = -1
        self.arrived = False

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True, exist_ok=True)
        self.arrived = self._has_arrived()
        if self.arrived:
            return self
        if not self.folder.is_dir():
            self._files.make_folder(self.folder)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                return self  # no locks here: hashes still keep what is written right
            os.close(self._lock)
            raise Conflict(f"another copy of {self.name} into {self.root} is under way", "let it finish") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in (*self._descriptors.values(), *([self._lock] if self._lock >= 0 else [])):
            os.close(descriptor)
        self._descriptors, self._lock = {}, -1

    def _has_arrived(self) -> bool:
        """Whether it has arrived before. The same checkpoint with damaged bytes is marked, and replaced by this copy.

        Raises DamagedCheckpoint where another one is there, or nobody can tell which.
        """
        if not os.path.lexists(self.final / NAME):
            return False
        if not self._is_the_same():
            fault = first_fault(self.final) or "it is another checkpoint of that name"
            raise DamagedCheckpoint(f"{self.final} is there already: {fault}", "delete it, or name another folder")
        fault = self._fault_there()
        note_verified(self.final, [fault] if fault else [])
        return not fault

    def _is_the_same(self) -> bool:
        """A large manifest is not parsed again: this one has been."""
        try:
            if os.lstat(self.final / NAME).st_size <= SMALL_BYTES:
                return bool(read_json(self.final)["digest"] == self.manifest.digest)
            return read_bytes(self.final / NAME, LARGEST_BYTES) == self.text
        except (CheckpointError, Unreadable, FileNotFoundError):
            return False

    def _fault_there(self) -> str:
        if os.lstat(self.final / NAME).st_size <= SMALL_BYTES:
            return first_fault(self.final)
        try:
            for file, index in self._all():
                data = memoryview(bytearray(self._size((file, index))))
                with opened(self.final / file) as descriptor:
                    read_at(self.final / file, descriptor, index * CHUNK_BYTES, data)
                if chunk_digest(data) != self._digest((file, index)):
                    return f"{self.final / file}: chunk {index + 1} is not what was saved"
        except (DamagedCheckpoint, Unreadable, FileNotFoundError) as e:
            return str(e)
        return ""

    def missing(self, progress: Progress | None = None) -> list[Chunk]:
        """Chunks that have to travel, in order. What other checkpoints of this folder hold is put in place here."""
        absent = [chunk for chunk in self._all() if not self._is_here(chunk, progress)]
        elsewhere = self._elsewhere({self._digest(chunk) for chunk in absent}) if absent else {}
        return [chunk for chunk in absent if not self._reuse(chunk, elsewhere, progress)]

    def write(self, chunk: Chunk, data: bytes | memoryview) -> None:
        """Raises DamagedCheckpoint where `data` is not what the manifest says: nothing wrong is ever written."""
        if len(data) != self._size(chunk) or chunk_digest(data) != self._digest(chunk):
            file, index = chunk
            raise DamagedCheckpoint(
                f"{self.name}/{file}: chunk {index + 1} of {len(self.manifest.files[file].xxh3_128)} arrived damaged",
                "is its source sound? `verify` tells",
            )
        self._files.put(self._descriptor(chunk[0]), memoryview(data), chunk[1] * CHUNK_BYTES)

    def commit(self) -> None:
        """Everything durable, read back and compared; then its name, and the manifest last."""
        for descriptor in self._descriptors.values():
            self._files.sync(descriptor)
            if hasattr(os, "posix_fadvise"):  # so that what is read back comes from the disk
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for path in self.folder.iterdir():
            if path.name not in self.manifest.files:
                self._files.remove(path)  # of a cut-off commit
        for chunk in self._all():
            if not self._is_here(chunk, None):
                raise CheckpointError(
                    f"{self.folder / chunk[0]} does not read back as it was written", "is the disk sound?"
                )
        self._files.sync_folder(self.folder)
        pinned = is_pinned(self.final)
        if self.final.exists():
            self._clear(self.final)
        self._files.rename(self.folder, self.final)
        self._files.sync_folder(self.root)
        part = self.final / f".{NAME}.part"
        write_file(self._files, part, self.text)
        self._files.rename(part, self.final / NAME)
        if pinned:
            pin(self.final)
        self._files.sync_folder(self.final)

    def _clear(self, folder: Path) -> None:
        """What an earlier commit left, cut between its two renames; or a damaged copy: manifest first, so that what is
        half deleted is no checkpoint."""
        for path in sorted(folder.iterdir(), key=lambda path: path.name != NAME):
            self._files.remove(path)
        self._files.remove_folder(folder)

    def _all(self) -> list[Chunk]:
        files = self.manifest.files.items()
        return [(file, index) for file, entry in files for index in range(chunk_count(entry.bytes))]

    def _size(self, chunk: Chunk) -> int:
        return min(CHUNK_BYTES, self.manifest.files[chunk[0]].bytes - chunk[1] * CHUNK_BYTES)

    def _digest(self, chunk: Chunk) -> str:
        return self.manifest.files[chunk[0]].xxh3_128[chunk[1]]

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = self._files.open_or_create(self.folder / file)
            if os.fstat(self._descriptors[file]).st_size > self.manifest.files[file].bytes:
                os.ftruncate(self._descriptors[file], self.manifest.files[file].bytes)
        return self._descriptors[file]

    def _is_here(self, chunk: Chunk, progress: Progress | None) -> bool:
        descriptor, size_bytes = self._descriptor(chunk[0]), self._size(chunk)
        if os.fstat(descriptor).st_size < chunk[1] * CHUNK_BYTES + size_bytes:
            return False
        data = memoryview(bytearray(size_bytes))
        read_at(self.folder / chunk[0], descriptor, chunk[1] * CHUNK_BYTES, data)
        here = chunk_digest(data) == self._digest(chunk)
        if here and progress is not None:
            progress(size_bytes)
        return here

    def _elsewhere(self, wanted: set[str]) -> dict[str, tuple[Path, int]]:
        """Digest -> file and offset, in other checkpoints of this folder."""
        found: dict[str, tuple[Path, int]] = {}
        for folder in newest_first(self.root):
            try:
                if os.lstat(folder / NAME).st_size > SMALL_BYTES:
                    continue  # what it would save is not worth reading that
                files = read_manifest(folder).files
            except (CheckpointError, OSError):
                continue
            for file, entry in files.items():
                places = ((digest, (folder / file, i * CHUNK_BYTES)) for i, digest in enumerate(entry.xxh3_128))
                found |= {digest: place for digest, place in places if digest in wanted and digest not in found}
        return found

    def _reuse(self, chunk: Chunk, elsewhere: dict[str, tuple[Path, int]], progress: Progress | None) -> bool:
        place = elsewhere.get(self._digest(chunk))
        if place is None:
            return False
        data = memoryview(bytearray(self._size(chunk)))
        try:
            descriptor = open_regular(place[0])
            try:
                read_at(place[0], descriptor, place[1], data)
            finally:
                os.close(descriptor)
            self.write(chunk, data)
        except DamagedCheckpoint:
            return False
        if progress is not None:
            progress(len(data))
        return True
