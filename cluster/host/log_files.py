"""Files of one rank's log.

Its supervisor appends; its agent, and the server for copies, read from either end.

rank-R.log        the first part, from byte 0 on; never removed
rank-R.log.N      a further part, from byte N on; only the newest parts remain

Offsets count every byte ever written, so an offset stays valid after its part is removed: a reader then gets a line
with the number of missing bytes, followed by what is left.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cluster.input.untrusted_files import open_untrusted

PARTS = 16
BLOCK_BYTES = 256 << 10
MAX_READ_BYTES = 1 << 20
"""Maximum bytes per read, more than the longest line."""
STAMP = len("2026-11-20T23:14:53.123456Z")


class LogWriter:
    """Writes a log and keeps about `limit_bytes` of it: the first sixteenth and the newest fifteen.

    A line is always complete in one part.
    """

    def __init__(self, path: Path, limit_bytes: int):
        self._path, self._part_bytes = path, max(limit_bytes // PARTS, 1)
        self._starts = [0]
        self._file = _create(path)
        self._end = 0

    def append(self, lines: bytes) -> int:
        """Write `lines`, which must be complete.

        Returns the bytes written: if the disk is full, complete lines only.
        """
        offset = 0
        while offset < len(lines):
            if self._end - self._starts[-1] >= self._part_bytes:
                self._next_part()
            space_bytes = max(self._part_bytes - (self._end - self._starts[-1]), 1)
            stop = lines.find(b"\n", offset + space_bytes - 1) + 1 or len(lines)
            written = self._write(lines[offset:stop])
            offset += written
            if offset < stop:
                break
        return offset

    def _write(self, lines: bytes) -> int:
        count = 0
        try:
            while count < len(lines):
                count += os.write(self._file, lines[count:])
        except OSError:
            count = lines.rfind(b"\n", 0, count) + 1
            with suppress(OSError):
                os.ftruncate(self._file, self._end - self._starts[-1] + count)
        self._end += count
        return count

    def _next_part(self) -> None:
        """Start a new part. The oldest is removed first, because the disk may be full.

        If no file can be created, the current part is continued.
        """
        if len(self._starts) >= PARTS:
            _part(self._path, self._starts.pop(1)).unlink(missing_ok=True)
        with suppress(OSError):
            file = _create(_part(self._path, self._end))
            os.close(self._file)
            self._file = file
            self._starts.append(self._end)

    def close(self) -> None:
        os.close(self._file)


class LogRead(NamedTuple):
    """Result of a read: `data` has complete lines up to byte `next`; `more`: further lines exist already."""

    data: bytes
    next: int
    more: bool


def read(path: Path, offset: int, limit_bytes: int) -> LogRead:
    """Return lines from byte `offset` on, about `limit_bytes`.

    Raises UnreadableFile; FileNotFoundError without a log.
    """
    offset = max(offset, 0)
    while True:
        parts = _parts(path)
        index = max((i for i, part in enumerate(parts) if part.start <= offset), default=0)
        if index + 1 < len(parts) and offset >= parts[index].end:
            index += 1
        part = parts[index]
        if offset > parts[-1].end:
            return LogRead(b"", offset, False)
        missing = max(part.start - offset, 0)
        begin = max(offset, part.start)
        try:
            data = _lines(part, begin, max(1, min(limit_bytes, MAX_READ_BYTES)))
        except FileNotFoundError:
            if index == 0:
                raise
            continue  # the part was removed since it was listed
        if not data:
            return LogRead(b"", offset, False)
        after = begin + len(data)
        return LogRead(_marker(missing, data) + data, after, after < part.end or index + 1 < len(parts))


def last(path: Path, count: int) -> tuple[int, int]:
    """Return the byte range of the last `count` lines. Raises FileNotFoundError, UnreadableFile."""
    end, begin = None, 0
    for block_start, block in _backwards(path):
        at = len(block)
        while count >= 0 and (newline := block.rfind(b"\n", 0, at)) >= 0:
            at, begin, count = newline, block_start + newline + 1, count - 1
            end = begin if end is None else end
        if count < 0:
            return begin, end or begin
    first = _parts(path)[0].start
    return first, first if end is None else end


class _Part(NamedTuple):
    start: int
    end: int
    path: Path


def _parts(path: Path) -> list[_Part]:
    """Return the parts in order. Raises FileNotFoundError if there is none."""
    parts = [_Part(0, path.stat(follow_symlinks=False).st_size, path)]
    for entry in os.scandir(path.parent):
        number = entry.name.removeprefix(f"{path.name}.")
        if number != entry.name and number.isascii() and number.isdigit() and len(number) < 19:
            with suppress(FileNotFoundError):
                parts.append(_Part(int(number), int(number) + entry.stat(follow_symlinks=False).st_size, Path(entry)))
    return sorted(parts)


def _part(path: Path, start: int) -> Path:
    return path.with_name(f"{path.name}.{start}")


def _create(path: Path) -> int:
    """Create a new file at `path`.

    An existing entry is replaced, never written to: it may be a pipe or a link.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def _lines(part: _Part, begin: int, limit_bytes: int) -> bytes:
    """Return complete lines, at least one if there is one.

    An unterminated line is returned once it is longer than any of our lines.
    """
    with open_untrusted(part.path) as file:
        data = os.pread(file, limit_bytes, begin - part.start)
        if len(data) == limit_bytes and b"\n" not in data:
            data = os.pread(file, MAX_READ_BYTES, begin - part.start)
    complete = data[: data.rfind(b"\n") + 1]
    return complete or (data if len(data) == MAX_READ_BYTES else b"")


def _marker(missing: int, following: bytes) -> bytes:
    """Return a line about missing bytes.

    It has the time of the following line, because lines are sorted by time.
    """
    text = f" err [polyfleet: {missing} bytes are left out here, the log reached its limit]\n"
    return following[:STAMP] + text.encode() if missing else b""


def _backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the log in blocks, the newest first, each with the offset of its first byte."""
    for part in reversed(_parts(path)):
        with suppress(FileNotFoundError), open_untrusted(part.path) as file:
            end = part.end
            while end > part.start:
                begin = max(part.start, end - BLOCK_BYTES)
                yield begin, os.pread(file, end - begin, begin - part.start)
                end = begin
