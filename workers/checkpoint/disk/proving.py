"""Reading in one pass: chunks are hashed while they are read into the tensors they belong to.

What was read is proved only once its chunk is complete, so a load that reads so may fill what it must then throw away.
It is for those that do: an attempt of a job, which goes on from the checkpoint before, or ends.
"""

import threading
from pathlib import Path

import xxhash

from workers.checkpoint.disk.reader import AT_ONCE_BYTES, Chunk, Reader
from workers.checkpoint.format.chunks import CHUNK_BYTES


class ProvingReader(Reader):
    """`read_into` feeds the hash of each chunk that it meets for the first time; `settle` proves what was read."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._open_chunks: dict[Chunk, _Chunk] = {}

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on. Raises DamagedCheckpoint where a chunk that ends here is not what was saved."""
        done = 0
        while done < len(out):
            index = (offset + done) // CHUNK_BYTES
            size_bytes = min(len(out) - done, (index + 1) * CHUNK_BYTES - offset - done)
            self._read_part((file, index), offset + done, out[done : done + size_bytes])
            done += size_bytes

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
            for start in range(before, len(part), AT_ONCE_BYTES):
                piece = part[start : start + AT_ONCE_BYTES]
                super().read_into(chunk[0], offset + start, piece)
                self._hashed(chunk, one, piece)

    def _chunk(self, chunk: Chunk) -> "_Chunk":
        file, index = chunk
        end = min((index + 1) * CHUNK_BYTES, self.manifest.files[file].bytes)
        with self._lock:
            return self._open_chunks.setdefault(chunk, _Chunk(index * CHUNK_BYTES, end))

    def _pass(self, chunk: Chunk, one: "_Chunk", until: int) -> None:
        """Hash up to a byte without keeping anything."""
        buffer = self.scratch()
        while one.at < until:
            piece = buffer[: min(AT_ONCE_BYTES, until - one.at)]
            super().read_into(chunk[0], one.at, piece)
            self._hashed(chunk, one, piece)

    def _hashed(self, chunk: Chunk, one: "_Chunk", piece: memoryview) -> None:
        one.digest.update(piece)
        one.at += len(piece)
        if one.at == one.end:
            if one.digest.hexdigest() != self.manifest.files[chunk[0]].xxh3_128[chunk[1]]:
                raise self.damaged(chunk)
            self._proved.add(chunk)


class _Chunk:
    """Hashed from `start` up to `at`."""

    def __init__(self, start: int, end: int):
        self.at, self.end = start, end
        self.digest = xxhash.xxh3_128()
        self.lock = threading.Lock()
