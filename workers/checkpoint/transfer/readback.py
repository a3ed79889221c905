"""Sync received chunks to the disk and read them back while others arrive.

So little is left to verify after the last byte, however large the checkpoint is.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from workers.checkpoint.disk.files import OpenFile, allocate_aligned, read_at_page, round_up_to_page
from workers.checkpoint.disk.reader import Chunk

MIN_BATCH = 4
"""Minimum number of chunks verified together: a sync, where one is needed, costs a commit of the journal."""
BUFFER_BYTES = 1 << 20
"""Bytes read and hashed at a time: they fit the processor's cache."""


class ReadBack:
    """Call `verify` with a few chunks at a time, in a thread; it raises if one was not stored correctly.
    Every later call raises that error again, because the kernel reports a failed write to one sync only.
    """

    def __init__(self, verify: Callable[[list[Chunk]], None]):
        self._verify = verify
        self._pending: list[Chunk] = []
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def add(self, chunk: Chunk) -> None:
        """Queue a chunk that was written. Never waits."""
        self._pending.append(chunk)
        if self._running is None or self._running.done():
            self._raise_error()
            if len(self._pending) >= MIN_BATCH:
                self._start_batch()

    def finish(self) -> None:
        """Wait until all queued chunks are verified."""
        self._raise_error()
        if self._pending:
            self._start_batch()
            self._raise_error()

    def close(self) -> None:
        """Stop reading. Errors that were not raised yet no longer matter."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _start_batch(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "read-back")
        batch, self._pending = self._pending, []
        self._running = self._thread.submit(self._verify, batch)

    def _raise_error(self) -> None:
        if self._running is not None:
            self._running.result()


def digest_at(file: OpenFile, start: int, size_bytes: int) -> str:
    """Hash `size_bytes` bytes from a page boundary on; "" if the file ends before."""
    buffer, digest = _buffer(), xxhash.xxh3_128()
    for done in range(0, size_bytes, BUFFER_BYTES):
        part_bytes = min(BUFFER_BYTES, size_bytes - done)
        if read_at_page(file, buffer[: round_up_to_page(part_bytes)], start + done) < part_bytes:
            return ""
        digest.update(buffer[:part_bytes])
    return digest.hexdigest()


def drop_cached(descriptor: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Drop synced ranges from the page cache, so that they are next read from the disk.
    A range is (offset, bytes); 0 bytes mean up to the end.
    """
    if hasattr(os, "posix_fadvise"):
        for offset, size_bytes in ranges:
            os.posix_fadvise(descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)


_scratch = threading.local()


def _buffer() -> memoryview:
    """Return BUFFER_BYTES of page-aligned memory of this thread."""
    if not hasattr(_scratch, "buffer"):
        _scratch.buffer = allocate_aligned(BUFFER_BYTES)
    buffer: memoryview = _scratch.buffer
    return buffer
