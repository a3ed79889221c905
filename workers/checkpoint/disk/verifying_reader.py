"""Reading in one pass: chunks are hashed while they are read into the tensors they belong to.

What was read is proved only once its chunk is complete, so a load that reads so may fill what it must then throw away.
It is for those that do: an attempt of a job, which goes on from the checkpoint before, or ends.
"""

import threading
from pathlib import Path

import xxhash

from workers.checkpoint.disk import passes
from workers.checkpoint.disk.reader import AT_ONCE_BYTES, CheckpointReader, Chunk
from workers.checkpoint.format.chunks import CHUNK_BYTES
from workers.checkpoint.load_report import ConversionLoss


class VerifyingReader(CheckpointReader):
    """`read_into` feeds the hash of each chunk that it meets for the first time; `settle` proves what was read."""

    def __init__(self, folder: Path, follow: bool = False):
        super().__init__(folder, follow)
        self._open_chunks: dict[Chunk, _Chunk] = {}

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on. Raises DamagedCheckpoint where a chunk that ends here is not what was saved."""
        done = 0
        while done < len(out):
            index = (offset + done) // CHUNK_BYTES
            size_bytes = min(len(out) - done, (index + 1) * CHUNK_BYTES - offset - done)
            self._read_part((file, index), offset + done, out[done : done + size_bytes])
            done += size_bytes

    def convert_into(
        self, file: str, offset: int, size_bytes: int, dtypes: tuple[str, str], out: memoryview | None, count: bool
    ) -> ConversionLoss:
        """As of a Reader; the chunk is hashed in the same pass, where it was hashed up to here."""
        chunk = (file, offset // CHUNK_BYTES)
        if chunk in self._proved:
            return super().convert_into(file, offset, size_bytes, dtypes, out, count)
        one = self._chunk(chunk)
        with one.lock:
            if offset < one.at or not isinstance(one.digest, passes.Digest):
                self._pass(chunk, one, offset + size_bytes)
                return super().convert_into(file, offset, size_bytes, dtypes, out, count)
            self._pass(chunk, one, offset)
            change = self._passed(file, offset, size_bytes, one.digest, out, dtypes, count)
            self._hashed(chunk, one, size_bytes)
            return change

    def settle(self) -> None:
        """Read what is left of each chunk of which something was read. Raises DamagedCheckpoint for one that is not
        what was saved."""
        for chunk in sorted(set(self._open_chunks) - self._proved):
            one = self._open_chunks[chunk]
            with one.lock:
                self._pass(chunk, one, one.end)
        self._open_chunks.clear()

    def _read_part(self, chunk: Chunk, offset: int, part: memoryview) -> None:
        """Of one chunk. It is hashed in order: what was skipped is read on the way, what was read before is not again
        part of the hash."""
        if chunk in self._proved:
            super().read_into(chunk[0], offset, part)
            return
        one = self._chunk(chunk)
        with one.lock:
            if offset > one.at:
                self._pass(chunk, one, offset)
            before = min(one.at - offset, len(part))
            if before:
                super().read_into(chunk[0], offset, part[:before])
            if before < len(part):
                self._take(chunk, one, part[before:])

    def _take(self, chunk: Chunk, one: "_Chunk", part: memoryview) -> None:
        """Read and hash what comes next of the chunk."""
        if isinstance(one.digest, passes.Digest):
            self._passed(chunk[0], one.at, len(part), one.digest, part)
            self._hashed(chunk, one, len(part))
            return
        for start in range(0, len(part), AT_ONCE_BYTES):
            piece = part[start : start + AT_ONCE_BYTES]
            super().read_into(chunk[0], one.at, piece)
            one.digest.update(piece)
            self._hashed(chunk, one, len(piece))

    def _chunk(self, chunk: Chunk) -> "_Chunk":
        file, index = chunk
        end = min((index + 1) * CHUNK_BYTES, self.manifest.files[file].bytes)
        with self._lock:
            if chunk not in self._open_chunks:
                compiled = self.native if end - index * CHUNK_BYTES > passes.SHORT_BYTES else None
                self._open_chunks[chunk] = _Chunk(index * CHUNK_BYTES, end, compiled)
            return self._open_chunks[chunk]

    def _pass(self, chunk: Chunk, one: "_Chunk", until: int) -> None:
        """Hash up to a byte without keeping anything."""
        if until > one.at and isinstance(one.digest, passes.Digest):
            size_bytes = until - one.at
            self._passed(chunk[0], one.at, size_bytes, one.digest)
            self._hashed(chunk, one, size_bytes)
            return
        buffer = self.scratch()
        while one.at < until:
            piece = buffer[: min(AT_ONCE_BYTES, until - one.at)]
            super().read_into(chunk[0], one.at, piece)
            one.digest.update(piece)
            self._hashed(chunk, one, len(piece))

    def _hashed(self, chunk: Chunk, one: "_Chunk", size_bytes: int) -> None:
        one.at += size_bytes
        if one.at == one.end:
            if one.digest.hexdigest() != self.manifest.files[chunk[0]].xxh3_128[chunk[1]]:
                raise self.damaged(chunk)
            self._proved.add(chunk)


class _Chunk:
    """Hashed from `start` up to `at`."""

    def __init__(self, start: int, end: int, compiled: passes.Passes | None):
        self.at, self.end = start, end
        self.digest = xxhash.xxh3_128() if compiled is None else compiled.digest()
        self.lock = threading.Lock()
