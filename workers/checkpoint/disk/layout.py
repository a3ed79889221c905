"""Lay out tensors in shard files before anything is written, so that threads can write any part.

A shard is an 8-byte length, a JSON header padded to a page, and the bytes of its tensors. The widest dtypes come first,
so that each tensor begins at a multiple of its item size and can be read without a copy. The safetensors package (0.8)
is not used for writing: it neither hashes nor fsyncs, and its files have mode 0600. A test opens these files with its
reader.
"""

import json
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from workers.checkpoint.conversion.passes import Digest
from workers.checkpoint.disk.files import round_up_to_page
from workers.checkpoint.format.manifest import CHUNK_BYTES, chunk_count

SHARD_BYTES = 2 << 30

Read = Callable[[int, int, memoryview], None]
"""Copies bytes start to stop of one tensor into a buffer."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A tensor, or a rank's box of one, to be written. `code` is the safetensors dtype, `key` identifies the tensor.
    `plain` returns all bytes without a copy, if they are contiguous in host memory.
    """

    key: str
    code: str
    shape: tuple[int, ...]
    bytes: int
    item_bytes: int
    read: Read = field(compare=False)
    plain: "Callable[[], memoryview] | None" = field(default=None, compare=False)

    def put(self, start: int, stop: int, out: memoryview, digest: Digest | None) -> None:
        """Copy bytes start to stop into `out`, and hash them with `digest`."""
        if digest is not None and self.plain is not None:
            digest.copy(out, self.plain()[start:stop])
            return
        self.read(start, stop, out)
        if digest is not None:
            digest.update(out)


@dataclass(frozen=True, slots=True)
class Layout:
    """One shard file. `offsets` of the pieces count from the start of the file."""

    file: str
    header: bytes
    pieces: tuple[TensorPiece, ...]
    offsets: tuple[int, ...]
    size_bytes: int

    @property
    def chunks(self) -> int:
        return chunk_count(self.size_bytes)

    def fill(self, index: int, out: memoryview, digest: Digest | None = None) -> int:
        """Copy chunk `index` into `out` and hash it with `digest`; return its size in bytes."""
        start = index * CHUNK_BYTES
        stop = min(start + CHUNK_BYTES, self.size_bytes)
        if start < len(self.header):
            head = self.header[start:stop]
            out[: len(head)] = head
            if digest is not None:
                digest.update(head)
        for i in range(max(bisect_right(self.offsets, start) - 1, 0), len(self.pieces)):
            begin = self.offsets[i]
            if begin >= stop:
                break
            first, last = max(start, begin), min(stop, begin + self.pieces[i].bytes)
            if first < last:
                self.pieces[i].put(first - begin, last - begin, out[first - start : last - start], digest)
        return stop - start


def lay_out(
    pieces: Iterable[TensorPiece],
    limit_bytes: int,
    name: str = "shard-{:05d}.safetensors",
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
) -> list[Layout]:
    """Lay out shards with at most `limit_bytes` of data, in order; a larger piece gets a shard of its own.
    `name` is formatted with the shard's number; `metadata` is written to each header.
    """
    shards = enumerate(_split(pieces, limit_bytes), start=1)
    return [_layout(name.format(number), shard, metadata) for number, shard in shards]


def _split(pieces: Iterable[TensorPiece], limit_bytes: int) -> Iterator[list[TensorPiece]]:
    shard: list[TensorPiece] = []
    size_bytes = 0
    for piece in pieces:
        if shard and size_bytes + piece.bytes > limit_bytes:
            yield shard
            shard, size_bytes = [], 0
        shard.append(piece)
        size_bytes += piece.bytes
    if shard:
        yield shard


def _layout(file: str, pieces: list[TensorPiece], metadata: Mapping[str, str]) -> Layout:
    ordered = tuple(sorted(pieces, key=lambda piece: -piece.item_bytes))
    header, offsets = _header(ordered, metadata), []
    end = len(header)
    for piece in ordered:
        offsets.append(end)
        end += piece.bytes
    return Layout(file, header, ordered, tuple(offsets), end)


def _header(pieces: tuple[TensorPiece, ...], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for piece in pieces:
        start, end = end, end + piece.bytes
        entries[piece.key] = {"dtype": piece.code, "shape": list(piece.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded_bytes = round_up_to_page(8 + len(text)) - 8
    return struct.pack("<Q", padded_bytes) + text.ljust(padded_bytes)
