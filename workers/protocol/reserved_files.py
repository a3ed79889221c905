"""Write files even when the disk is full, into blocks that were allocated while there was space.

The reserve of a file is `.NAME.reserve` in the same folder. Standard library only, and quick to import.
"""

import errno
import os
from pathlib import Path

from workers.protocol.folders import replace_text

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full(e: OSError) -> bool:
    """Return whether the error is a full disk or an exceeded quota."""
    return e.errno in FULL


def allocate(path: Path, size_bytes: int) -> int:
    """Create a file with `size_bytes` zero bytes allocated; return its descriptor.

    Raises OSError without space.
    """
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
    """Let `replace_or_use_reserve` write `size_bytes` to `path` once, even if the disk is full by then."""
    os.close(allocate(_reserve_path(path), size_bytes))


def replace_or_use_reserve(path: Path, text: str, *, durable: bool = False, shorter: str = "") -> None:
    """Write `text` to `path` like `replace_text`; on a full disk use the reserve, which becomes `path`.

    `shorter` is written if `text` does not fit into the reserve. Without a reserve, an existing file is overwritten in
    place. Raises OSError if that fails, too.
    """
    try:
        replace_text(path, text, durable=durable)
    except OSError as e:
        if not is_full(e):
            raise
        _overwrite(path, text.encode(), shorter.encode(), durable)


def _overwrite(path: Path, data: bytes, shorter: bytes, durable: bool) -> None:
    reserve = _reserve_path(path)
    source = reserve if reserve.exists() else path
    descriptor = os.open(source, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        capacity = os.fstat(descriptor).st_size
        data = data if len(data) <= capacity else shorter
        if not 0 < len(data) <= capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if source != path:
        source.replace(path)


def _reserve_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")
