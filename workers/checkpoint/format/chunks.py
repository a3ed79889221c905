"""Hashes of a file, one per 8 MiB chunk: a partial read verifies what it touches, and a fault is named to 8 MiB."""

import xxhash

CHUNK_BYTES = 8 << 20


def chunk_digest(data: "bytes | memoryview") -> str:
    return xxhash.xxh3_128(data).hexdigest()


def chunk_count(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)
