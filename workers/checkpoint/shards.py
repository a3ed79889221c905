"""Plain safetensors files, written in one pass: an 8-byte length, a JSON header, the bytes of each tensor.

Written here rather than by the safetensors package because a save must hash, fsync and be interruptible at each
operation; the package (0.8) does none of these and leaves mode 0600. Its own reader opens these files: a test does so.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from workers.checkpoint.chunks import CHUNK_BYTES, ChunkHashes
from workers.checkpoint.files import Files
from workers.checkpoint.manifest import FileEntry

SHARD_BYTES = 1 << 30
PAGE_BYTES = 4096
"""Data begins at a page boundary, as direct I/O and mmap like it: the header is padded with spaces."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A tensor ready to be written: `code` is safetensors' dtype, `data` its bytes in logical order."""

    name: str
    code: str
    shape: tuple[int, ...]
    data: memoryview


def split(blobs: Iterable[Blob], limit_bytes: int) -> Iterator[list[Blob]]:
    """Shards of at most `limit_bytes`, in order; a blob larger than that is alone."""
    shard: list[Blob] = []
    size_bytes = 0
    for blob in blobs:
        if shard and size_bytes + len(blob.data) > limit_bytes:
            yield shard
            shard, size_bytes = [], 0
        shard.append(blob)
        size_bytes += len(blob.data)
    if shard:
        yield shard


def write_shard(files: Files, path: Path, blobs: list[Blob]) -> tuple[FileEntry, dict[str, int]]:
    """Write and fsync one shard; the folder's own fsync is the caller's. Also answers where each blob begins."""
    header, hashes, offsets = _header(blobs), ChunkHashes(), {}
    file = files.create(path)
    try:
        for name, piece in (("", memoryview(header)), *((blob.name, blob.data) for blob in blobs)):
            offsets[name] = hashes.size_bytes
            for start in range(0, len(piece), CHUNK_BYTES):
                part = piece[start : start + CHUNK_BYTES]
                hashes.update(part)
                files.write(file, part)
        files.close_durably(file)
    finally:
        file.close()
    return FileEntry(hashes.size_bytes, hashes.digests()), offsets


def _header(blobs: list[Blob]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for blob in blobs:
        start, end = end, end + len(blob.data)
        entries[blob.name] = {"dtype": blob.code, "shape": list(blob.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded_bytes = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8
    return struct.pack("<Q", padded_bytes) + text.ljust(padded_bytes)
