"""Files below one pool's storage, for checkpoints that move between pools. No path and no link leads out of it.

Each folder on the way is opened relative to the one above it and never through a link, so a link that user code puts
there while we look is not followed.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from cluster.errors import FleetError, NotFound, UserError
from cluster.paths import storage_dir

LARGEST_PIECE_BYTES = 8 << 20
INCOMING = ".incoming-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Storage:
    """All paths are relative to `root`, with `/`."""

    def __init__(self, root: Path):
        self.root = storage_dir(root)

    def read(self, path: str, offset: int, limit_bytes: int) -> bytes:
        """At most `limit_bytes`, and at most 8 MiB; b"" at the end."""
        *above, name = _parts(path)
        with self._opened(above) as folder, _reported(path):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            with os.fdopen(descriptor, "rb") as f:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise UserError(f"{path!r} is not a regular file")
                return os.pread(f.fileno(), min(limit_bytes, LARGEST_PIECE_BYTES), offset)

    def resolve(self, path: str) -> Path:
        """The absolute path, once every folder on it was found without following a link; for readers of checkpoints."""
        parts = _parts(path) if path else []
        with self._opened(parts):
            return self.root.joinpath(*parts)

    def find(self, path: str) -> Path:
        """The absolute path of a file or folder, found without following a link. Raises NotFound, UserError."""
        *above, name = _parts(path)
        with self._opened(above) as folder, _reported(path):
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise UserError(f"{path!r} is a link", "links are not followed")
        return self.root.joinpath(*above, name)

    def make(self, folder: str) -> Path:
        """The absolute path of a folder, made with those above it if need be."""
        parts = _parts(folder)
        with self._opened(parts, make=True):
            return self.root.joinpath(*parts)

    def exists(self, folder: str) -> bool:
        try:
            with self._opened(_parts(folder)):
                return True
        except NotFound:
            return False

    @contextmanager
    def _opened(self, parts: list[str], make: bool = False) -> Iterator[int]:
        """A descriptor of the folder."""
        descriptor = os.open(self.root, _FOLDER)
        try:
            for part in parts:
                with _reported("/".join(parts)):
                    if make and part not in _names(descriptor):
                        os.mkdir(part, 0o700, dir_fd=descriptor)
                    below = os.open(part, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def _reported(path: str) -> Iterator[None]:
    """System errors as ours, with the path as it was given."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"no {path!r} in this pool's storage", "list the folder above it") from None
    except (NotADirectoryError, IsADirectoryError):
        raise UserError(f"{path!r} is a file where a folder is needed, or the other way round, or a link") from None
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FleetError(f"no room for {path!r} in this pool's storage: {e.strerror}", "make room there") from None
        raise UserError(f"{path!r}: {e.strerror}", "links are not followed") from None


def _parts(path: str) -> list[str]:
    """Raises UserError for a path that is absolute, empty or climbs."""
    parts = path.split("/")
    bad = not path or path.startswith("/") or "\0" in path or "\\" in path
    if bad or any(part in ("", ".", "..") for part in parts) or str(PurePosixPath(path)) != path:
        raise UserError(f"{path[:200]!r} is not a path below this pool's storage", "use names and `/`, no `..`")
    return parts


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]
