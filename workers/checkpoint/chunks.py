"""Hashes of a file, one per 8 MiB chunk: a partial read verifies what it touches, and a fault is named to 8 MiB."""

from dataclasses import dataclass, field

import xxhash

CHUNK_BYTES = 8 << 20


def chunk_digest(data: "bytes | memoryview") -> str:
    return xxhash.xxh3_128(data).hexdigest()


def chunk_count(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


@dataclass(slots=True)
class ChunkHashes:
    """Fed with a file's bytes in order, it holds the digest of each chunk and the size so far."""

    size_bytes: int = 0
    _full: list[str] = field(default_factory=list)
    _open: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    def update(self, data: "bytes | memoryview") -> None:
        rest = memoryview(data)
        while rest:
            room = CHUNK_BYTES - self.size_bytes % CHUNK_BYTES
            part, rest = rest[:room], rest[room:]
            self._open.update(part)
            self.size_bytes += len(part)
            if self.size_bytes % CHUNK_BYTES == 0:
                self._full.append(self._open.hexdigest())
                self._open = xxhash.xxh3_128()

    def digests(self) -> tuple[str, ...]:
        """Of all chunks; the last may be shorter than the others."""
        unfinished = (self._open.hexdigest(),) if self.size_bytes % CHUNK_BYTES else ()
        return (*self._full, *unfinished)
