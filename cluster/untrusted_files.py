"""Files and texts that somebody we do not trust may have written: job code, a stranger's archive, another user.

A path of theirs may be a pipe that blocks for ever, a link to another file, a folder, or a sparse file of a terabyte;
a text may be nested until the reader's stack ends. Standard library only, and light: supervisors import this.
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

DEEPEST = 32
"""Nested lists and objects; ours have less than ten."""
LARGEST_INTEGER = 2**63 - 1
"""What SQL databases and JavaScript's readers of our JSON can hold at most."""
_PIECE_BYTES = 1 << 20
_STRING = re.compile(rb'"[^"]*(?:"|\Z)')  # one that never ends goes to the end of the text
_OTHERS = bytes(set(range(256)) - set(b'[{]}"'))
_STEP = [1 if bracket in b"[{" else -1 for bracket in range(256)]
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_OF_THE_READER = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR})


class UnreadableFile(UserError):
    """`what` names the file or text, `why` says what is wrong with it.

    `passing`: the reader had no descriptor or memory left, or the disk failed; who wrote the file is not to blame.
    """

    def __init__(self, what: str, why: str, passing: bool = False):
        super().__init__(f"{what} {why}", "write a plain file of UTF-8 text there, or remove it")
        self.args = (what, why, passing)
        self.why, self.passing = why, passing


@contextmanager
def open_untrusted(path: Path, *, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor to read `path`, which is a regular file and no link; opening a pipe or a device never blocks.

    Folders above it may be links: pass `dir_fd` to read below a folder that is open already. Raises UnreadableFile, or
    FileNotFoundError.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as e:
        raise UnreadableFile(str(path), f"cannot be opened: {getattr(e, 'strerror', None) or e}", _passing(e)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableFile(str(path), "is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_untrusted_in(folder: Path, name: str) -> Iterator[int]:
    """As `opened` for the file `name` of `folder`, which is no link either; what lies above is trusted."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise UnreadableFile(str(folder), f"is not a folder that can be read: {e.strerror}", _passing(e)) from None
    try:
        with open_untrusted(Path(name), dir_fd=descriptor) as file:
            yield file
    finally:
        os.close(descriptor)


def read_bytes(path: Path, limit_bytes: int, *, dir_fd: int | None = None) -> bytes:
    """All of a regular file. Raises UnreadableFile, also when it holds more than `limit_bytes`; FileNotFoundError."""
    data = bytearray()
    with open_untrusted(path, dir_fd=dir_fd) as descriptor:
        try:
            if os.fstat(descriptor).st_size > limit_bytes:
                raise _too_long(path, limit_bytes)
            while piece := os.read(descriptor, min(_PIECE_BYTES, limit_bytes + 1 - len(data))):
                data += piece
        except OSError as e:
            raise UnreadableFile(str(path), f"cannot be read: {e.strerror}", _passing(e)) from None
    if len(data) > limit_bytes:  # it grew, or is of /proc, where sizes are 0
        raise _too_long(path, limit_bytes)
    return bytes(data)


def read_json(path: Path, limit_bytes: int, *, deepest: int = DEEPEST) -> Any:
    """See `parse_json`; also FileNotFoundError."""
    return parse_json(read_bytes(path, limit_bytes), str(path), deepest=deepest)


def parse_json(data: bytes, what: str, *, deepest: int = DEEPEST) -> Any:
    """JSON of finite numbers, integers within 64 bits, nested at most `deepest` times, in text that UTF-8 can hold.

    Raises UnreadableFile.
    """
    if data.count(b"[") + data.count(b"{") > deepest and depth(data) > deepest:
        raise UnreadableFile(what, f"is nested more than {deepest} times")
    try:
        value = json.loads(data.decode(), parse_constant=_not_finite, parse_float=_finite, parse_int=_within_64_bits)
        if _HALF_CHARACTER.search(data):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as e:
        raise UnreadableFile(what, f"is not JSON that can be read: {str(e)[:200]}") from None


def depth(data: bytes) -> int:
    """How deep the brackets outside of strings are nested: without recursion, in linear time, in little memory."""
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    telling = unescaped.translate(None, _OTHERS).replace(b'""', b"")  # what is left has brackets between
    return max(0, max(accumulate(map(_STEP.__getitem__, _STRING.sub(b"", telling))), default=0))


def _too_long(path: Path, limit_bytes: int) -> UnreadableFile:
    return UnreadableFile(str(path), f"is longer than the limit of {limit_bytes} bytes")


def _passing(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _OF_THE_READER


def _not_finite(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number in JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is beyond the range of a float")
    return number


def _within_64_bits(text: str) -> int:
    if len(text) > 20 or abs(number := int(text)) > LARGEST_INTEGER:
        raise ValueError(f"{text[:20]}… is beyond 64 bits")
    return number
