"""The files of one rank's log: appended to by its supervisor, read from either end by its agent, and by the server
where it keeps a copy.

rank-R.log        the first part, from byte 0 on; it is never removed
rank-R.log.N      a further part, from byte N on; only the newest of them stay

Offsets count every byte that was ever written, so one that somebody kept stays valid after its part is removed: whoever
reads there gets a line that says how much is missing, and goes on with what is left.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cluster.untrusted_files import open_untrusted

PARTS = 16
BLOCK_BYTES = 256 << 10
LONGEST_READ_BYTES = 1 << 20
"""Longer than any line."""
STAMP = len("2026-11-20T23:14:53.123456Z")


class Writer:
    """Keeps about `limit_bytes`: the first sixteenth and the newest fifteen. Lines are never cut by a part's end."""

    def __init__(self, path: Path, limit_bytes: int):
        self._path, self._part_bytes = path, max(limit_bytes // PARTS, 1)
        self._starts = [0]
        self._file = _create(path)
        self._end = 0

    def append(self, lines: bytes) -> int:
        """How many bytes of `lines` (whole ones) were written: all, unless the disk is full; then whole lines."""
        done = 0
        while done < len(lines):
            if self._end - self._starts[-1] >= self._part_bytes:
                self._next_part()
            left = max(self._part_bytes - (self._end - self._starts[-1]), 1)
            stop = lines.find(b"\n", done + left - 1) + 1 or len(lines)
            written = self._write(lines[done:stop])
            done += written
            if done < stop:
                break
        return done

    def _write(self, lines: bytes) -> int:
        done = 0
        try:
            while done < len(lines):
                done += os.write(self._file, lines[done:])
        except OSError:
            done = lines.rfind(b"\n", 0, done) + 1
            with suppress(OSError):
                os.ftruncate(self._file, self._end - self._starts[-1] + done)
        self._end += done
        return done

    def _next_part(self) -> None:
        """The oldest goes first: the disk may be full. When no file can be made, the present one goes on."""
        if len(self._starts) >= PARTS:
            _part(self._path, self._starts.pop(1)).unlink(missing_ok=True)
        with suppress(OSError):
            file = _create(_part(self._path, self._end))
            os.close(self._file)
            self._file = file
            self._starts.append(self._end)

    def close(self) -> None:
        os.close(self._file)


class Read(NamedTuple):
    """`data` is whole lines up to byte `next`; with `more`, there are more behind them now."""

    data: bytes
    next: int
    more: bool


def read(path: Path, offset: int, limit_bytes: int) -> Read:
    """Lines from byte `offset` on, about `limit_bytes`. Raises FileNotFoundError before there is a log,
    UnreadableFile.
    """
    offset = max(offset, 0)
    while True:
        parts = _parts(path)
        at = max((i for i, part in enumerate(parts) if part.start <= offset), default=0)
        if at + 1 < len(parts) and offset >= parts[at].end:
            at += 1
        part = parts[at]
        if offset > parts[-1].end:
            return Read(b"", offset, False)
        missing = max(part.start - offset, 0)
        begin = max(offset, part.start)
        try:
            data = _lines(part, begin, max(1, min(limit_bytes, LONGEST_READ_BYTES)))
        except FileNotFoundError:
            if at == 0:
                raise
            continue  # removed since we looked
        if not data:
            return Read(b"", offset, False)
        after = begin + len(data)
        return Read(_marker(missing, data) + data, after, after < part.end or at + 1 < len(parts))


def last(path: Path, count: int) -> tuple[int, int]:
    """The bytes between which the last `count` lines lie. Raises FileNotFoundError, UnreadableFile."""
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
    """In order. Raises FileNotFoundError when there is none."""
    found = [_Part(0, path.stat(follow_symlinks=False).st_size, path)]
    for entry in os.scandir(path.parent):
        number = entry.name.removeprefix(f"{path.name}.")
        if number != entry.name and number.isascii() and number.isdigit() and len(number) < 19:
            with suppress(FileNotFoundError):
                found.append(_Part(int(number), int(number) + entry.stat(follow_symlinks=False).st_size, Path(entry)))
    return sorted(found)


def _part(path: Path, start: int) -> Path:
    return path.with_name(f"{path.name}.{start}")


def _create(path: Path) -> int:
    """Nothing that lies there already is written to: neither a pipe nor what a link leads to."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def _lines(part: _Part, begin: int, limit_bytes: int) -> bytes:
    """Whole lines, at least one where there is one; a line without end is taken once it is longer than any of ours."""
    with open_untrusted(part.path) as file:
        data = os.pread(file, limit_bytes, begin - part.start)
        if len(data) == limit_bytes and b"\n" not in data:
            data = os.pread(file, LONGEST_READ_BYTES, begin - part.start)
    whole = data[: data.rfind(b"\n") + 1]
    return whole or (data if len(data) == LONGEST_READ_BYTES else b"")


def _marker(missing: int, following: bytes) -> bytes:
    """With the time of the line behind it: lines are put in order by time."""
    said = f" err [polyfleet: {missing} bytes are left out here, the log reached its limit]\n"
    return following[:STAMP] + said.encode() if missing else b""


def _backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """The log in blocks, the newest first, each with the offset of its first byte."""
    for part in reversed(_parts(path)):
        with suppress(FileNotFoundError), open_untrusted(part.path) as file:
            end = part.end
            while end > part.start:
                begin = max(part.start, end - BLOCK_BYTES)
                yield begin, os.pread(file, end - begin, begin - part.start)
                end = begin
