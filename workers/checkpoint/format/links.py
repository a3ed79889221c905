"""Symbolic links and git-lfs pointers: files that stand for others.

Links are refused by default: a link that a job or an archive left behind may point to any file of this machine, and
nodes read such folders on behalf of others. Paths that users name on their own machine may contain links: the Hugging
Face cache consists of them. A process that reads for its own user calls `follow` once, before it starts reading.
"""

import os
from pathlib import Path

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
"""First line of a pointer. Source: git-lfs, docs/spec.md."""

_followed = False


def follow() -> None:
    """Follow links in this process from now on, because its user named all paths that it reads."""
    global _followed
    _followed = True


def are_followed() -> bool:
    return _followed


def resolve_links(path: Path) -> Path:
    """Return the file behind links if links are followed, else `path`, for readers that refuse links."""
    return path.resolve() if _followed else path


def size_bytes(path: Path) -> int:
    """Size of a file; of a link itself unless links are followed. Raises OSError."""
    return path.stat(follow_symlinks=_followed).st_size


def is_pointer(path: Path) -> bool:
    """Check whether the file is a git-lfs pointer, whose content was not downloaded. A link is not a pointer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.pread(descriptor, len(LFS_POINTER), 0) == LFS_POINTER
    except OSError:  # a folder, a pipe
        return False
    finally:
        os.close(descriptor)


def pointer_message(path: Path | str) -> tuple[str, str]:
    """Return message and remedy for a pointer."""
    return f"{path} is a git-lfs pointer, not the file itself", "run `git lfs pull` in its repository, then try again"
