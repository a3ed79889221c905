"""Receive a checkpoint into a folder: find missing chunks, write them, and commit.

    .incoming-step-…/      chunks are written at their positions, each verified; they stay for a week if interrupted
    step-…/                the same folder, renamed after every byte was read back and verified; manifest last

Chunks that another checkpoint of the same folder contains (frozen layers, an earlier copy) are copied from there. Each
chunk is written to the disk and read back while others arrive (readback.py); what an earlier try left is read back
before it is reused.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.errors import Conflict
from cluster.input.untrusted_files import UnreadableFile, open_untrusted, read_bytes
from workers.checkpoint.disk.commit import write_manifest
from workers.checkpoint.disk.damage_marks import record_verification
from workers.checkpoint.disk.files import Files, OpenFile, allocate_aligned, round_up_to_page
from workers.checkpoint.disk.pins import PIN, is_pinned, pin
from workers.checkpoint.disk.reader import Chunk, read_at
from workers.checkpoint.disk.retention import INCOMING, first_damage, remove_checkpoint
from workers.checkpoint.format.manifest import (
    CHUNK_BYTES,
    MAX_INLINE_BYTES,
    MAX_MANIFEST_BYTES,
    NAME,
    DamagedCheckpoint,
    chunk_digest,
)
from workers.checkpoint.format.manifest_checks import open_regular, parse_manifest, read_json, read_manifest
from workers.checkpoint.format.step_folders import newest_first
from workers.checkpoint.transfer.expected import ExpectedFiles, expected_of
from workers.checkpoint.transfer.readback import ReadBack, digest_at, drop_cached
from workers.errors import CheckpointError

Progress = Callable[[int], None]


class CheckpointReceiver:
    """Write an incoming checkpoint, for use in a `with`. Raises Conflict if another process already writes it."""

    def __init__(
        self, root: Path, name: str, text: bytes, files: Files | None = None, expected: ExpectedFiles | None = None
    ):
        """Prepare to receive. `expected` is the content of manifest `text`, if it was read and checked elsewhere."""
        self.root, self.name, self.text = root, name, text
        self.manifest = expected or expected_of(parse_manifest(text, f"{name}/{NAME}"))
        self.folder, self.final_folder = root / f"{INCOMING}{name}", root / name
        self._files = files or Files()
        self._open: dict[str, OpenFile] = {}
        self._buffer: memoryview | None = None
        self._verified_chunks: set[Chunk] = set()
        self._read_back = ReadBack(self._verify_on_disk)
        self._lock = -1
        self.is_complete = False

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True, exist_ok=True)
        self.is_complete = self._check_complete()
        if self.is_complete:
            return self
        if not self.folder.is_dir():
            self._files.make_folder(self.folder)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                return self  # this file system has no locks; hashes still protect what is written
            os.close(self._lock)
            raise Conflict(
                f"another copy of {self.name} into {self.root} is running", "wait until it has finished"
            ) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._read_back.close()
        for file in self._open.values():
            file.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._open, self._lock = {}, -1

    def _check_complete(self) -> bool:
        """Check whether the checkpoint is already here. If it is damaged it is marked, and this copy replaces it.

        Raises DamagedCheckpoint if a different or unreadable checkpoint has this name.
        """
        if not os.path.lexists(self.final_folder / NAME):
            return False
        if not self._has_same_manifest():
            fault = first_damage(self.final_folder) or "it is another checkpoint with that name"
            raise DamagedCheckpoint(f"{self.final_folder} already exists: {fault}", "delete it, or name another folder")
        fault = self._existing_fault()
        record_verification(self.final_folder, [fault] if fault else [])
        return not fault

    def _has_same_manifest(self) -> bool:
        """Compare the manifests. A large one is compared as text, without parsing it."""
        try:
            if os.lstat(self.final_folder / NAME).st_size <= MAX_INLINE_BYTES:
                return bool(read_json(self.final_folder)["digest"] == self.manifest.digest)
            return read_bytes(self.final_folder / NAME, MAX_MANIFEST_BYTES) == self.text
        except (CheckpointError, UnreadableFile, FileNotFoundError):
            return False

    def _existing_fault(self) -> str:
        if os.lstat(self.final_folder / NAME).st_size <= MAX_INLINE_BYTES:
            return first_damage(self.final_folder)
        try:
            for file, index in self.manifest.chunks():
                data = memoryview(bytearray(self.manifest.size_of((file, index))))
                with open_untrusted(self.final_folder / file) as descriptor:
                    read_at(self.final_folder / file, descriptor, index * CHUNK_BYTES, data)
                if chunk_digest(data) != self.manifest.digest_of((file, index)):
                    return f"{self.final_folder / file}: chunk {index + 1} is not what was saved"
        except (DamagedCheckpoint, UnreadableFile, FileNotFoundError) as e:
            return str(e)
        return ""

    def missing(self, progress: Progress | None = None) -> list[Chunk]:
        """List chunks that must be transferred, in order. Chunks in other checkpoints here are copied from them."""
        not_received = [chunk for chunk in self.manifest.chunks() if not self._is_already_stored(chunk, progress)]
        sources = self._find_sources({self.manifest.digest_of(chunk) for chunk in not_received}) if not_received else {}
        return [chunk for chunk in not_received if not self._reuse(chunk, sources, progress)]

    def write(self, chunk: Chunk, data: bytes | memoryview) -> None:
        """Write a chunk. Raises DamagedCheckpoint, without writing, if `data` differs from the manifest.
        An error of the disk may be raised with a later chunk. Call it from one thread at a time.
        """
        if len(data) != self.manifest.size_of(chunk) or chunk_digest(data) != self.manifest.digest_of(chunk):
            raise DamagedCheckpoint(
                f"{self.name}/{chunk[0]}: {self.manifest.name_of(chunk)} arrived damaged",
                "check its source with `verify`",
            )
        if self._buffer is None:
            self._buffer = allocate_aligned(CHUNK_BYTES)
        self._buffer[: len(data)] = data
        file, offset = self._open_file(chunk[0]), chunk[1] * CHUNK_BYTES
        self._files.write(file, self._buffer[: round_up_to_page(len(data))], len(data), offset)
        if not file.direct:
            drop_cached(file.descriptor, [(offset, len(data))])  # makes the kernel start writing it to the disk
        self._read_back.add(chunk)

    def commit(self) -> None:
        """Sync everything, read it back and compare; then rename the folder and write the manifest last."""
        self._read_back.finish()
        self._verify_on_disk([chunk for chunk in self.manifest.chunks() if chunk not in self._verified_chunks])
        self._verified_chunks.clear()  # a retry after an error reads everything again
        for name in list(self._open):
            self._files.finish(self._open[name])
            del self._open[name]
        for path in self.folder.iterdir():
            if path.name not in (*self.manifest.files, PIN):
                self._files.remove(path)  # left by an interrupted commit
        if is_pinned(self.final_folder):
            pin(self.folder)  # before the pinned one is removed, so that an interruption does not lose the pin
        self._files.sync_folder(self.folder)
        if self.final_folder.exists():
            remove_checkpoint(self._files, self.final_folder)  # left by an interrupted commit, or damaged
        self._files.rename(self.folder, self.final_folder)
        self._files.sync_folder(self.root)
        write_manifest(self._files, self.final_folder, self.text)

    def _open_file(self, file: str) -> OpenFile:
        if file not in self._open:
            self._open[file] = self._files.open_or_create(self.folder / file, self.manifest.files[file].bytes)
        return self._open[file]

    def _is_already_stored(self, chunk: Chunk, progress: Progress | None) -> bool:
        """Check whether an earlier try left this chunk."""
        if chunk[0] not in self._open:
            self._sync(chunk[0], [(0, 0)])
        if not self._is_stored(chunk):
            return False
        self._verified_chunks.add(chunk)
        if progress is not None:
            progress(self.manifest.size_of(chunk))
        return True

    def _verify_on_disk(self, chunks: list[Chunk]) -> None:
        """Sync chunks to the disk and compare what was stored. Raises CheckpointError."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for file, index in chunks:
            ranges.setdefault(file, []).append((index * CHUNK_BYTES, self.manifest.size_of((file, index))))
        for file, file_ranges in ranges.items():
            if not self._open_file(file).direct:
                self._sync(file, file_ranges)
        for chunk in chunks:
            if not self._is_stored(chunk):
                raise CheckpointError(
                    f"{self.folder / chunk[0]}: {self.manifest.name_of(chunk)} does not read back as it was written",
                    "check the disk for errors",
                )
            self._verified_chunks.add(chunk)

    def _sync(self, file: str, ranges: list[tuple[int, int]]) -> None:
        """Sync a file, so that later reads of these ranges (offset, bytes) come from the disk."""
        descriptor = self._open_file(file).descriptor
        if os.fstat(descriptor).st_size:
            self._files.sync(descriptor)
            drop_cached(descriptor, ranges)

    def _is_stored(self, chunk: Chunk) -> bool:
        start, size_bytes = chunk[1] * CHUNK_BYTES, self.manifest.size_of(chunk)
        return digest_at(self._open_file(chunk[0]), start, size_bytes) == self.manifest.digest_of(chunk)

    def _find_sources(self, digests: set[str]) -> dict[str, tuple[Path, int]]:
        """Map digests to file and offset in other checkpoints of this folder."""
        sources: dict[str, tuple[Path, int]] = {}
        for folder in newest_first(self.root):
            try:
                if os.lstat(folder / NAME).st_size > MAX_INLINE_BYTES:
                    continue  # reading it costs more than reuse would save
                files = read_manifest(folder).files
            except (CheckpointError, OSError):
                continue
            for file, entry in files.items():
                locations = ((digest, (folder / file, i * CHUNK_BYTES)) for i, digest in enumerate(entry.xxh3_128))
                sources |= {
                    digest: location for digest, location in locations if digest in digests and digest not in sources
                }
        return sources

    def _reuse(self, chunk: Chunk, sources: dict[str, tuple[Path, int]], progress: Progress | None) -> bool:
        source = sources.get(self.manifest.digest_of(chunk))
        if source is None:
            return False
        data = memoryview(bytearray(self.manifest.size_of(chunk)))
        try:
            descriptor = open_regular(source[0])
            try:
                read_at(source[0], descriptor, source[1], data)
            finally:
                os.close(descriptor)
            self.write(chunk, data)
        except DamagedCheckpoint:
            return False
        if progress is not None:
            progress(len(data))
        return True
