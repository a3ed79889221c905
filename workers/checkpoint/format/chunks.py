"""Hash files per 8 MiB chunk, to verify partial reads and to locate a fault to 8 MiB."""

import xxhash

CHUNK_BYTES = 8 << 20


def chunk_digest(data: "bytes | memoryview") -> str:
    return xxhash.xxh3_128(data).hexdigest()


def chunk_count(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)
