"""Read checkpoints verified: chunks are checked against their hashes before anything is returned.

A live model must stay untouched if the last chunk turns out to be damaged. Reading everything twice through the page
cache costs less for that than a copy of the checkpoint in memory. Where the model may be changed, one pass is enough:
loading/verifying_reader.py.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Self

import xxhash

from workers.checkpoint.conversion import passes
from workers.checkpoint.conversion.load_report import ConversionLoss
from workers.checkpoint.format import links
from workers.checkpoint.format.manifest import CHUNK_BYTES, DamagedCheckpoint, Manifest, TensorEntry, chunk_count
from workers.checkpoint.format.manifest_checks import box_bytes, open_regular, read_manifest
from workers.checkpoint.format.message_text import first_names

THREADS = 2
READ_BYTES = 1 << 20
"""Bytes read and hashed at a time: they fit the processor's cache, and the kernel's read-ahead matches this size."""

Chunk = tuple[str, int]
Progress = Callable[[int, int], None]


class CheckpointReader:
    """One checkpoint folder, open for reading, for use in a `with`. Raises DamagedCheckpoint naming file and chunk."""

    def __init__(self, folder: Path, follow: bool = False):
        """Open `folder`. With `follow`, files that are links are read too."""
        self.folder, self._follow = folder, follow
        self.manifest: Manifest = read_manifest(folder, follow)
        self._open = ExitStack()
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self._verified: set[Chunk] = set()
        self._tensor_ranges: dict[str, list[tuple[int, int, str]]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @cached_property
    def native(self) -> passes.Passes | None:
        """Compiled passes, built on first use if the checkpoint is large enough, or None."""
        return passes.compiled_passes(sum(entry.bytes for entry in self.manifest.files.values()))

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor, or of the tensor it is tied to."""
        return self.manifest.tensors[self.manifest.resolve(name)]

    def chunks_of(self, name: str) -> Iterator[Chunk]:
        """Yield the chunks that contain bytes of a stored tensor."""
        tensor = self.entry(name)
        for stored in tensor.shards:
            size_bytes = box_bytes(tensor, stored)
            last = (stored.offset + size_bytes - 1) // CHUNK_BYTES if size_bytes else -1
            yield from ((stored.file, index) for index in range(stored.offset // CHUNK_BYTES, last + 1))

    def all_chunks(self) -> Iterator[Chunk]:
        for file, entry in self.manifest.files.items():
            yield from ((file, index) for index in range(chunk_count(entry.bytes)))

    def verify_chunks(self, chunks: Iterable[Chunk], progress: Progress | None = None) -> None:
        """Read and hash the chunks not verified yet. Raises DamagedCheckpoint for the first that differs from what was
        saved.
        """
        unverified = sorted(set(chunks) - self._verified)
        for file in dict.fromkeys(file for file, _ in unverified):
            self.descriptor(file)  # sizes first: a truncated file is noticed without reading
        for fault in self._find_faults(unverified, progress):
            raise fault
        self._verified.update(unverified)

    def damaged_chunks(self, progress: Progress | None = None) -> Iterator[DamagedCheckpoint]:
        """Yield every fault of every file: reads all bytes."""
        sound = []
        for file in self.manifest.files:
            try:
                self.descriptor(file)
                sound.append(file)
            except DamagedCheckpoint as e:
                yield e
        yield from self._find_faults([c for c in self.all_chunks() if c[0] in sound], progress)

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on, without verifying: call `verify_chunks` first."""
        read_at(self.folder / file, self.descriptor(file), offset, out)

    def convert_into(
        self, file: str, offset: int, size_bytes: int, dtypes: tuple[str, str], out: memoryview | None, count: bool
    ) -> ConversionLoss:
        """Read, convert and count in one compiled pass (`native` must not be None); without `out` only count.
        Values must be at multiples of their size, within one chunk. Does not verify, like `read_into`.
        """
        return self._run_pass(file, offset, size_bytes, None, out, dtypes, count)

    def finish_verification(self) -> None:
        """Verify the rest of what was read (see loading/verifying_reader.py). Nothing to do here: `verify_chunks`
        did it before reading.
        """

    def descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = self._open_file(file)
            return self._descriptors[file]

    def _open_file(self, file: str) -> int:
        descriptor = open_regular(self.folder / file, self._follow)
        self._open.callback(os.close, descriptor)
        actual_bytes, saved_bytes = os.fstat(descriptor).st_size, self.manifest.files[file].bytes
        if actual_bytes != saved_bytes:
            if links.is_pointer(self.folder / file):
                raise DamagedCheckpoint(*links.pointer_message(self.folder / file))
            inside = self._tensors_between(file, min(actual_bytes, saved_bytes), max(actual_bytes, saved_bytes))
            raise DamagedCheckpoint(
                f"{self.folder / file} has {actual_bytes} bytes, {saved_bytes} were saved ({inside})"
            )
        return descriptor

    def _find_faults(self, chunks: list[Chunk], progress: Progress | None) -> Iterator[DamagedCheckpoint]:
        """Yield faults in order. Threads read ahead of the chunk whose result is needed."""
        total, done = len(chunks) * CHUNK_BYTES, 0
        pool = ThreadPoolExecutor(THREADS, "verify")
        try:
            for fault in pool.map(self._check, chunks) if len(chunks) > 1 else map(self._check, chunks):
                done += CHUNK_BYTES
                if progress is not None:
                    progress(done, total)
                if fault:
                    yield fault
        finally:
            pool.shutdown(cancel_futures=True)

    def _check(self, chunk: Chunk) -> DamagedCheckpoint | None:
        file, index = chunk
        entry = self.manifest.files[file]
        start, end = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, entry.bytes)
        try:
            if self._hash_of(file, start, end) == entry.xxh3_128[index]:
                return None
        except DamagedCheckpoint as e:
            return e
        return self.chunk_error(chunk)

    def chunk_error(self, chunk: Chunk) -> DamagedCheckpoint:
        """Return the error for a chunk whose hash differs."""
        file, index = chunk
        entry = self.manifest.files[file]
        start, end = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, entry.bytes)
        return DamagedCheckpoint(
            f"{self.folder / file}: chunk {index + 1} of {len(entry.xxh3_128)} is not what was saved"
            f" (bytes {start} to {end}: {self._tensors_between(file, start, end)})"
        )

    @staticmethod
    def scratch() -> memoryview:
        """Return READ_BYTES of memory of this thread, for bytes that are only hashed."""
        if not hasattr(_scratch, "buffer"):
            _scratch.buffer = memoryview(bytearray(READ_BYTES))
        buffer: memoryview = _scratch.buffer
        return buffer

    def _run_pass(
        self,
        file: str,
        offset: int,
        size_bytes: int,
        digest: passes.Digest | None,
        out: memoryview | None = None,
        dtypes: tuple[str, str] | None = None,
        count: bool = False,
    ) -> ConversionLoss:
        assert self.native is not None
        path = self.folder / file
        return self.native.run(path, self.descriptor(file), offset, size_bytes, digest, out, dtypes, count)

    def _hash_of(self, file: str, start: int, end: int) -> str:
        if self.native is not None and end - start > passes.SHORT_BYTES:
            compiled = self.native.digest()
            self._run_pass(file, start, end - start, compiled)
            return compiled.hexdigest()
        buffer, digest = self.scratch(), xxhash.xxh3_128()
        for position in range(start, end, READ_BYTES):
            part = buffer[: min(READ_BYTES, end - position)]
            self.read_into(file, position, part)
            digest.update(part)
        return digest.hexdigest()

    def _tensors_between(self, file: str, start: int, end: int) -> str:
        """Name the tensors that have bytes from `start` to `end` of `file`, for a message."""
        ranges = self._ranges_by_file().get(file, [])
        first = bisect_right(ranges, start, key=lambda span: span[1])
        touched = takewhile(lambda span: span[0] < end, ranges[first:])
        return first_names(dict.fromkeys(name for _, _, name in touched)) or "no tensor"

    def _ranges_by_file(self) -> dict[str, list[tuple[int, int, str]]]:
        """Map each file to its tensors: start, end and name, in order."""
        if self._tensor_ranges is None:
            ranges: dict[str, list[tuple[int, int, str]]] = {}
            for name, tensor in self.manifest.stored().items():
                for stored in tensor.shards:
                    if size_bytes := box_bytes(tensor, stored):
                        end = stored.offset + size_bytes
                        ranges.setdefault(stored.file, []).append((stored.offset, end, name))
            self._tensor_ranges = {file: sorted(spans) for file, spans in ranges.items()}
        return self._tensor_ranges


_scratch = threading.local()


def read_at(path: Path, descriptor: int, start: int, out: memoryview) -> None:
    """Fill `out` from `start` on. Raises DamagedCheckpoint if the file ends too early or cannot be read."""
    done = 0
    while done < len(out):
        try:
            count = os.preadv(descriptor, [out[done:]], start + done)
        except OSError as e:
            raise DamagedCheckpoint(f"{path} cannot be read at byte {start + done}: {e.strerror or e}") from e
        if count == 0:
            raise DamagedCheckpoint(
                f"{path} ends at byte {start + done} while it was being read: the file was truncated"
            )
        done += count
