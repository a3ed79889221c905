"""Read files and texts from untrusted writers: job code, unknown archives, other users.

A path may be a pipe that blocks for ever, a link to another file, a folder, or a sparse file of a terabyte; a text may
be nested until the reader's stack overflows. Standard library only, and quick to import: supervisors import this.
"""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from cluster.errors import UserError

MAX_DEPTH = 32
"""Maximum nesting of lists and objects; our own files have less than ten levels."""
MAX_INTEGER = 2**63 - 1
"""Largest integer that SQL databases can hold."""
_PIECE_BYTES = 1 << 20
_STRING = re.compile(rb'"[^"]*(?:"|\Z)')  # an unterminated string extends to the end of the text
_OTHERS = bytes(set(range(256)) - set(b'[{]}"'))
_STEP = [1 if bracket in b"[{" else -1 for bracket in range(256)]
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_READER_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR})


class UnreadableFile(UserError):
    """An untrusted file cannot be used. `what` names the file or text, `why` says what is wrong with it.

    `is_transient`: the reader had no descriptor or memory left, or the disk failed; the file itself may be valid.
    """

    def __init__(self, what: str, why: str, is_transient: bool = False):
        super().__init__(f"{what} {why}", "write a plain file of UTF-8 text there, or remove it")
        self.args = (what, why, is_transient)
        self.reason, self.is_transient = why, is_transient


@contextmanager
def open_untrusted(path: Path, *, dir_fd: int | None = None) -> Iterator[int]:
    """Yield a descriptor to read `path`, which must be a regular file, not a link.

    Never blocks on a pipe or device.

    Folders above it may be links: pass `dir_fd` to read below a folder that is open already. Raises UnreadableFile, or
    FileNotFoundError.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as e:
        raise UnreadableFile(
            str(path), f"cannot be opened: {getattr(e, 'strerror', None) or e}", _is_transient(e)
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableFile(str(path), "is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_untrusted_in(folder: Path, name: str) -> Iterator[int]:
    """Like `open_untrusted`, for the file `name` of `folder`, which must not be a link either.

    Its parents are trusted.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise UnreadableFile(str(folder), f"is not a folder that can be read: {e.strerror}", _is_transient(e)) from None
    try:
        with open_untrusted(Path(name), dir_fd=descriptor) as file:
            yield file
    finally:
        os.close(descriptor)


def read_bytes(path: Path, limit_bytes: int, *, dir_fd: int | None = None) -> bytes:
    """Read a regular file.

    Raises FileNotFoundError, or UnreadableFile, also for a file longer than `limit_bytes`.
    """
    data = bytearray()
    with open_untrusted(path, dir_fd=dir_fd) as descriptor:
        try:
            if os.fstat(descriptor).st_size > limit_bytes:
                raise _too_long(path, limit_bytes)
            while piece := os.read(descriptor, min(_PIECE_BYTES, limit_bytes + 1 - len(data))):
                data += piece
        except OSError as e:
            raise UnreadableFile(str(path), f"cannot be read: {e.strerror}", _is_transient(e)) from None
    if len(data) > limit_bytes:  # the file grew, or is in /proc, where sizes are 0
        raise _too_long(path, limit_bytes)
    return bytes(data)


def read_json(path: Path, limit_bytes: int, *, max_depth: int = MAX_DEPTH) -> Any:
    """Read and parse a JSON file. Raises like `parse_json`, and FileNotFoundError."""
    return parse_json(read_bytes(path, limit_bytes), str(path), max_depth=max_depth)


def parse_json(data: bytes, what: str, *, max_depth: int = MAX_DEPTH) -> Any:
    """Parse JSON from an untrusted writer.

    Accepts finite numbers, integers within 64 bits, at most `max_depth` levels, and text that UTF-8 can hold. `what`
    names the data in errors. Raises UnreadableFile.
    """
    if data.count(b"[") + data.count(b"{") > max_depth and depth(data) > max_depth:
        raise UnreadableFile(what, f"is nested more than {max_depth} times")
    try:
        value = json.loads(data.decode(), parse_constant=_not_finite, parse_float=_finite, parse_int=_within_64_bits)
        if _HALF_CHARACTER.search(data):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as e:
        raise UnreadableFile(what, f"is not JSON that can be read: {str(e)[:200]}") from None


def depth(data: bytes) -> int:
    """Return how deeply brackets outside strings are nested.

    Without recursion, in linear time and little memory.
    """
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = unescaped.translate(None, _OTHERS).replace(b'""', b"")  # strings that are left contain brackets
    return max(0, max(accumulate(map(_STEP.__getitem__, _STRING.sub(b"", brackets))), default=0))


def _too_long(path: Path, limit_bytes: int) -> UnreadableFile:
    return UnreadableFile(str(path), f"is longer than the limit of {limit_bytes} bytes")


def _is_transient(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _READER_ERRORS


def _not_finite(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number in JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is beyond the range of a float")
    return number


def _within_64_bits(text: str) -> int:
    if len(text) > 20 or abs(number := int(text)) > MAX_INTEGER:
        raise ValueError(f"{text[:20]}… is beyond 64 bits")
    return number
