"""Write shards with a few threads: each takes the next chunk, fills, hashes and writes it.

Filling, hashing and writing all release the GIL, so two threads keep a disk busy.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from workers.checkpoint.conversion import passes
from workers.checkpoint.disk.files import Files, OpenFile, allocate_aligned, round_up_to_page
from workers.checkpoint.disk.layout import Layout
from workers.checkpoint.format.manifest import CHUNK_BYTES, FileEntry, chunk_digest

THREADS = 6
"""Some write while others fill and hash. On 2 busy cores 4 threads reached 80 % of the disk's speed, 6 reached 95 %."""
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total, from any thread."""


class Arena:
    """A copy of all shards in host memory, laid out as the files, written while the originals change.

    The memory is reused and grows to the largest save: only the first save pays for touching it.
    """

    def __init__(self) -> None:
        self._memory = allocate_aligned(1)
        self._starts: dict[str, int] = {}

    def copy_shards(self, layouts: list[Layout]) -> None:
        """Copy all shards now."""
        self._starts, end = {}, 0
        for layout in layouts:
            self._starts[layout.file] = end
            end += round_up_to_page(layout.size_bytes)
        if end > len(self._memory):
            self._memory = allocate_aligned(end)
        work = [(layout, index) for layout in layouts for index in range(layout.chunks)]
        _in_threads(work, lambda item, _: item[0].fill(item[1], self.chunk(*item)), scratch=False)

    def chunk(self, layout: Layout, index: int) -> memoryview:
        """Memory of a chunk, up to the next page boundary."""
        begin = self._starts[layout.file] + index * CHUNK_BYTES
        end = self._starts[layout.file] + min((index + 1) * CHUNK_BYTES, round_up_to_page(layout.size_bytes))
        return self._memory[begin:end]

    def piece(self, layout: Layout, offset: int, size_bytes: int) -> memoryview:
        """`size_bytes` of a shard, from byte `offset` of its file on."""
        begin = self._starts[layout.file] + offset
        return self._memory[begin : begin + size_bytes]


@dataclass(slots=True)
class _Shard:
    """One file that is being written."""

    layout: Layout
    remaining_chunks: int
    file: OpenFile | None = None
    digests: dict[int, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def write_shards(
    files: Files, folder: Path, layouts: list[Layout], arena: Arena | None = None, progress: Progress | None = None
) -> dict[str, FileEntry]:
    """Write and fsync all shards, from `arena` unless it is None. The caller syncs the folder.

    Raises the first OSError; files in `folder` may then be half written.
    """
    shards = [_Shard(layout, layout.chunks) for layout in layouts]
    total_bytes = sum(layout.size_bytes for layout in layouts)
    counter, compiled = ByteProgress(total_bytes, progress), passes.compiled_passes(total_bytes, build=False)

    def write(item: tuple[_Shard, int], scratch: memoryview) -> None:
        shard, index = item
        size_bytes = min(CHUNK_BYTES, shard.layout.size_bytes - index * CHUNK_BYTES)
        hash_text = ""
        if arena is not None:
            data = arena.chunk(shard.layout, index)
        else:
            data = scratch
            digest = compiled.digest() if compiled and size_bytes > passes.SHORT_BYTES else None
            shard.layout.fill(index, scratch, digest)
            hash_text = digest.hexdigest() if digest else ""
        _put(files, folder, shard, index, data, size_bytes, hash_text or chunk_digest(data[:size_bytes]))
        counter.add(size_bytes)

    try:
        work = [(shard, index) for shard in shards for index in range(shard.layout.chunks)]
        _in_threads(work, write, scratch=arena is None)
    finally:
        for shard in shards:
            if shard.file is not None:
                shard.file.close()
    return {
        shard.layout.file: FileEntry(shard.layout.size_bytes, tuple(shard.digests[i] for i in sorted(shard.digests)))
        for shard in shards
    }


def _put(files: Files, folder: Path, shard: _Shard, index: int, data: memoryview, size_bytes: int, digest: str) -> None:
    with shard.lock:
        if shard.file is None:
            shard.file = files.create(folder / shard.layout.file, shard.layout.size_bytes)
    files.write(shard.file, data, size_bytes, index * CHUNK_BYTES)
    with shard.lock:
        shard.digests[index] = digest
        shard.remaining_chunks -= 1
        last = not shard.remaining_chunks
    if last:
        files.finish(shard.file)


class ByteProgress:
    """Report the number of bytes done, at most `total`, from any thread."""

    def __init__(self, total: int, progress: Progress | None):
        self.total, self._progress, self._done, self._lock = total, progress, 0, threading.Lock()

    def add(self, size_bytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done = min(self._done + size_bytes, self.total)
                self._progress(self._done, self.total)


def _in_threads(work: list, do: Callable, scratch: bool) -> None:  # type: ignore[type-arg]
    """Call `do(item, buffer)` for all of `work` from a few threads. The first error stops all and is raised."""
    items, lock = iter(work), threading.Lock()
    errors: list[BaseException] = []  # the first is the cause; later ones may be consequences

    def run() -> None:
        buffer = allocate_aligned(CHUNK_BYTES) if scratch else memoryview(b"")
        while not errors:
            with lock:
                item = next(items, None)
            if item is None:
                return
            try:
                do(item, buffer)
            except BaseException as e:
                errors.append(e)
                return

    if len(work) == 1:
        run()  # a small state needs no thread
    elif work:
        with ThreadPoolExecutor(min(THREADS, len(work)), "checkpoint") as pool:
            for _ in range(min(THREADS, len(work))):
                pool.submit(run)
    if errors:
        raise errors[0]
