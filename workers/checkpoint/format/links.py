"""Files that stand for others: symbolic links and pointers of git-lfs.

Links are guarded: what a job or an archive left behind may hold one to any file of this machine, and nodes read such
folders for whoever asks. What a user names on a machine of their own is another matter: the Hugging Face cache is made
of links. A process that reads for its own user says so with `follow`, once, before it begins.
"""

import os
from pathlib import Path

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
"""How a pointer begins. Source: git-lfs, docs/spec.md."""

_followed = False


def follow() -> None:
    """From here on this process follows links: all that it reads was named by the user it runs for."""
    global _followed
    _followed = True


def are_followed() -> bool:
    return _followed


def real(path: Path) -> Path:
    """The file behind links where they are followed, else `path`, for readers that refuse links themselves."""
    return path.resolve() if _followed else path


def size_bytes(path: Path) -> int:
    """Of a link itself unless links are followed. Raises OSError."""
    return path.stat(follow_symlinks=_followed).st_size


def is_pointer(path: Path) -> bool:
    """Whether git-lfs has not yet put the file itself there. Pointers are never links."""
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


def pointer_words(path: Path | str) -> tuple[str, str]:
    """What to say of one, and what helps."""
    return f"{path} is a git-lfs pointer, not the file itself", "run `git lfs pull` in its repository, then try again"
