"""Bytes that arrived are brought to the disk and read back while others arrive, a few chunks behind whoever writes:
what is left once the last byte has come is small, however large the checkpoint is.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from workers.checkpoint.disk.buffers import aligned
from workers.checkpoint.disk.files import Writing, read_at_page, rounded_up
from workers.checkpoint.disk.reader import Chunk

AT_ONCE = 4
"""Chunks that are proved together, at least: where a sync is needed, it costs a commit of the journal."""
BUFFER_BYTES = 1 << 20
"""Read and hashed while it is in the processor's cache."""


class ReadBack:
    """`prove` gets some chunks at a time, in a thread of its own, and raises where one is not on the disk as it should
    be. What it raised is raised by every later call: the kernel tells a failed write to one sync only.
    """

    def __init__(self, prove: Callable[[list[Chunk]], None]):
        self._prove = prove
        self._waiting: list[Chunk] = []
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def add(self, chunk: Chunk) -> None:
        """It was written. Waits for nothing."""
        self._waiting.append(chunk)
        if self._running is None or self._running.done():
            self._settle()
            if len(self._waiting) >= AT_ONCE:
                self._begin()

    def finish(self) -> None:
        """Return once all that was added is proved."""
        self._settle()
        if self._waiting:
            self._begin()
            self._settle()

    def close(self) -> None:
        """Nothing reads from then on; errors were told, or do not matter any more."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "read-back")
        batch, self._waiting = self._waiting, []
        self._running = self._thread.submit(self._prove, batch)

    def _settle(self) -> None:
        if self._running is not None:
            self._running.result()


def digest_at(file: Writing, start: int, size_bytes: int) -> str:
    """The hash of so many bytes from a page boundary on; "" where the file ends before."""
    buffer, digest = _buffer(), xxhash.xxh3_128()
    for done in range(0, size_bytes, BUFFER_BYTES):
        part_bytes = min(BUFFER_BYTES, size_bytes - done)
        if read_at_page(file, buffer[: rounded_up(part_bytes)], start + done) < part_bytes:
            return ""
        digest.update(buffer[:part_bytes])
    return digest.hexdigest()


def drop_cached(descriptor: int, places: Iterable[tuple[int, int]]) -> None:
    """(offset, bytes) of what was synced: what is read there next comes from the disk. 0 bytes: up to the end."""
    if hasattr(os, "posix_fadvise"):
        for offset, size_bytes in places:
            os.posix_fadvise(descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)


_scratch = threading.local()


def _buffer() -> memoryview:
    """BUFFER_BYTES of this thread, at a page boundary."""
    if not hasattr(_scratch, "buffer"):
        _scratch.buffer = aligned(BUFFER_BYTES)
    buffer: memoryview = _scratch.buffer
    return buffer
