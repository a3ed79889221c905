"""Read and verify in one pass: chunks are hashed while they are read into their tensors.

A chunk is verified only once it was read completely, so tensors may be filled with data that turns out to be damaged.
This is for callers that then discard them: an attempt of a job, which resumes from an older checkpoint or ends.
"""

import threading
from pathlib import Path

import xxhash

from workers.checkpoint.conversion import passes
from workers.checkpoint.conversion.load_report import ConversionLoss
from workers.checkpoint.disk.reader import READ_BYTES, CheckpointReader, Chunk
from workers.checkpoint.format.manifest import CHUNK_BYTES


class VerifyingReader(CheckpointReader):
    """Reader whose `read_into` hashes each chunk on first reading; `finish_verification` verifies all that was read."""

    def __init__(self, folder: Path, follow: bool = False):
        super().__init__(folder, follow)
        self._open_chunks: dict[Chunk, _ChunkHash] = {}

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on. Raises DamagedCheckpoint if a chunk that ends here is not what was saved."""
        done = 0
        while done < len(out):
            index = (offset + done) // CHUNK_BYTES
            size_bytes = min(len(out) - done, (index + 1) * CHUNK_BYTES - offset - done)
            self._read_part((file, index), offset + done, out[done : done + size_bytes])
            done += size_bytes

    def convert_into(
        self, file: str, offset: int, size_bytes: int, dtypes: tuple[str, str], out: memoryview | None, count: bool
    ) -> ConversionLoss:
        """Like CheckpointReader's, and hash the chunk in the same pass if it was hashed up to `offset`."""
        chunk = (file, offset // CHUNK_BYTES)
        if chunk in self._verified:
            return super().convert_into(file, offset, size_bytes, dtypes, out, count)
        state = self._chunk(chunk)
        with state.lock:
            if offset < state.position or not isinstance(state.digest, passes.Digest):
                self._hash_until(chunk, state, offset + size_bytes)
                return super().convert_into(file, offset, size_bytes, dtypes, out, count)
            self._hash_until(chunk, state, offset)
            change = self._run_pass(file, offset, size_bytes, state.digest, out, dtypes, count)
            self._advance(chunk, state, size_bytes)
            return change

    def finish_verification(self) -> None:
        """Read the rest of each chunk that was read in part. Raises DamagedCheckpoint for one that differs."""
        for chunk in sorted(set(self._open_chunks) - self._verified):
            state = self._open_chunks[chunk]
            with state.lock:
                self._hash_until(chunk, state, state.end)
        self._open_chunks.clear()

    def _read_part(self, chunk: Chunk, offset: int, part: memoryview) -> None:
        """Read part of one chunk, hashing the chunk in order.
        Skipped bytes are read and hashed too; bytes that were hashed before are not hashed again.
        """
        if chunk in self._verified:
            super().read_into(chunk[0], offset, part)
            return
        state = self._chunk(chunk)
        with state.lock:
            if offset > state.position:
                self._hash_until(chunk, state, offset)
            hashed_bytes = min(state.position - offset, len(part))
            if hashed_bytes:
                super().read_into(chunk[0], offset, part[:hashed_bytes])
            if hashed_bytes < len(part):
                self._read_and_hash(chunk, state, part[hashed_bytes:])

    def _read_and_hash(self, chunk: Chunk, state: "_ChunkHash", part: memoryview) -> None:
        """Read and hash the next bytes of the chunk."""
        if isinstance(state.digest, passes.Digest):
            self._run_pass(chunk[0], state.position, len(part), state.digest, part)
            self._advance(chunk, state, len(part))
            return
        for start in range(0, len(part), READ_BYTES):
            piece = part[start : start + READ_BYTES]
            super().read_into(chunk[0], state.position, piece)
            state.digest.update(piece)
            self._advance(chunk, state, len(piece))

    def _chunk(self, chunk: Chunk) -> "_ChunkHash":
        file, index = chunk
        end = min((index + 1) * CHUNK_BYTES, self.manifest.files[file].bytes)
        with self._lock:
            if chunk not in self._open_chunks:
                compiled = self.native if end - index * CHUNK_BYTES > passes.SHORT_BYTES else None
                self._open_chunks[chunk] = _ChunkHash(index * CHUNK_BYTES, end, compiled)
            return self._open_chunks[chunk]

    def _hash_until(self, chunk: Chunk, state: "_ChunkHash", until: int) -> None:
        """Hash up to byte `until` without keeping the data."""
        if until > state.position and isinstance(state.digest, passes.Digest):
            size_bytes = until - state.position
            self._run_pass(chunk[0], state.position, size_bytes, state.digest)
            self._advance(chunk, state, size_bytes)
            return
        buffer = self.scratch()
        while state.position < until:
            piece = buffer[: min(READ_BYTES, until - state.position)]
            super().read_into(chunk[0], state.position, piece)
            state.digest.update(piece)
            self._advance(chunk, state, len(piece))

    def _advance(self, chunk: Chunk, state: "_ChunkHash", size_bytes: int) -> None:
        state.position += size_bytes
        if state.position == state.end:
            if state.digest.hexdigest() != self.manifest.files[chunk[0]].xxh3_128[chunk[1]]:
                raise self.chunk_error(chunk)
            self._verified.add(chunk)


class _ChunkHash:
    """Hash state of one chunk: hashed up to byte `position`, complete at `end`."""

    def __init__(self, start: int, end: int, compiled: passes.Passes | None):
        self.position, self.end = start, end
        self.digest = xxhash.xxh3_128() if compiled is None else compiled.digest()
        self.lock = threading.Lock()
