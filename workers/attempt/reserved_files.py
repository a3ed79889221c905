"""Files that can be written when the disk is full: their blocks were allocated while there was space.

A reserve lies beside the file it is for, as `.NAME.reserve`. Standard library only, and light.
"""

import errno
import os
from pathlib import Path

from workers.attempt.folders import replace_text

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full(e: OSError) -> bool:
    """The disk, or this user's quota."""
    return e.errno in FULL


def allocated(path: Path, size_bytes: int) -> int:
    """A descriptor of a new file with blocks for `size_bytes`, all zero. Raises OSError when there is no space."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size_bytes)
        else:
            os.pwrite(descriptor, b"\0" * size_bytes, 0)
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return descriptor


def reserve_space(path: Path, size_bytes: int) -> None:
    """From now on `put` can write so many bytes to `path`, once, whatever happens to the disk."""
    os.close(allocated(_reserve(path), size_bytes))


def replace_or_use_reserve(path: Path, text: str, *, durable: bool = False, shorter: str = "") -> None:
    """`replace_text`, and on a full disk by the reserve, which then becomes `path`. `shorter` is written where the
    reserve cannot hold `text`. Without a reserve an existing file is written over. Raises OSError when nothing helps.
    """
    try:
        replace_text(path, text, durable=durable)
    except OSError as e:
        if not is_full(e):
            raise
        _put_in_place(path, text.encode(), shorter.encode(), durable)


def _put_in_place(path: Path, data: bytes, shorter: bytes, durable: bool) -> None:
    reserve = _reserve(path)
    source = reserve if reserve.exists() else path
    descriptor = os.open(source, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fits = os.fstat(descriptor).st_size
        data = data if len(data) <= fits else shorter
        if not 0 < len(data) <= fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if source != path:
        source.replace(path)


def _reserve(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")
